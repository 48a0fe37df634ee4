// Products of bfloat16 matrices summed in float32, by AMX tiles or AVX512-BF16 instructions.
//
// c[M, N] = a[M, K] b[K, N]. Both operands are packed first, K filled up with zeros to whole tiles:
// a into rows of K, b into panels of 32 columns whose tiles hold pairs of neighbours in K. Every
// element is summed in one order, whatever the number of threads.

#ifndef FORNAX_KERNELS_BFLOAT16_PRODUCT_H_
#define FORNAX_KERNELS_BFLOAT16_PRODUCT_H_

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)
#define FORNAX_BFLOAT16_PRODUCTS 1

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "simd.h"

namespace fornax {

constexpr int64_t kTile = 16;   // rows of a tile, and columns of one of b or c
constexpr int64_t kDepth = 32;  // elements of K in a tile
constexpr int64_t kSide = 32;   // rows and columns of c that are computed together
constexpr int64_t kTileSize = kTile * kDepth;

// Whether the processor has AMX tiles, and Linux lets this process use them.
inline bool has_tiles() {
#if defined(FORNAX_WITHOUT_TILES)  // as the tests compile it, for processors that have none
  return false;
#endif
  static const bool has = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24 & 1) && (d >> 22 & 1);
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

#define FORNAX_AMX __attribute__((target("amx-tile,amx-bf16")))

// Tile registers for a scope; without AMX nothing.
class Tiles {
 public:
  Tiles() {
    if (has_tiles()) configure();
  }
  ~Tiles() {
    if (has_tiles()) release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  FORNAX_AMX static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  FORNAX_AMX static void release() { _tile_release(); }
};

FORNAX_AMX inline void tile_block(int64_t tiles, const Half* a, int64_t a_row, const Half* panel,
                                  float* c, int64_t c_row, int64_t) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < tiles; ++t) {
    _tile_loadd(4, a + t * kDepth, a_row * 2);
    _tile_loadd(6, panel + 2 * t * kTileSize, 64);
    _tile_loadd(5, a + kTile * a_row + t * kDepth, a_row * 2);
    _tile_loadd(7, panel + (2 * t + 1) * kTileSize, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_row * 4);
  _tile_stored(1, c + kTile, c_row * 4);
  _tile_stored(2, c + kTile * c_row, c_row * 4);
  _tile_stored(3, c + kTile * c_row + kTile, c_row * 4);
}

inline void vector_block(int64_t tiles, const Half* a, int64_t a_row, const Half* panel, float* c,
                         int64_t c_row, int64_t rows) {
  constexpr int kRows = 8;
  for (int64_t top = 0; top < std::min(kSide, rows); top += kRows) {
    __m512 sums[kRows][2];
    for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < tiles; ++t) {
      const Half* left = panel + 2 * t * kTileSize;
      for (int64_t r = 0; r < kTile; ++r) {
        const auto b0 = (__m512bh)_mm512_loadu_si512(left + r * kDepth);
        const auto b1 = (__m512bh)_mm512_loadu_si512(left + kTileSize + r * kDepth);
        for (int i = 0; i < kRows; ++i) {
          int32_t pair;
          std::memcpy(&pair, a + (top + i) * a_row + t * kDepth + 2 * r, sizeof pair);
          const auto x = (__m512bh)_mm512_set1_epi32(pair);
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, b0);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, b1);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      _mm512_storeu_ps(c + (top + i) * c_row, sums[i][0]);
      _mm512_storeu_ps(c + (top + i) * c_row + kTile, sums[i][1]);
    }
  }
}

// c[32, 32] = a[32, K] b[K, 32]; a in rows `a_row` apart, b a packed panel, K = 32 tiles. Rows of c
// from `rows` on are undefined: without tiles they are not computed, but for some of the next seven.
inline void block_product(int64_t tiles, const Half* a, int64_t a_row, const Half* panel, float* c,
                          int64_t c_row, int64_t rows = kSide) {
  (has_tiles() ? tile_block : vector_block)(tiles, a, a_row, panel, c, c_row, rows);
}

inline __mmask32 first_32(int64_t count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1;
}
inline __mmask16 first_16(int64_t count) {
  return static_cast<__mmask16>(first_32(std::min<int64_t>(count, 16)));
}

// Rows of 16 words of 4 bytes become columns.
inline void transpose_words(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(rows[i + j], rows[i + j + 4], 0xdd);
    }
  }
  for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// A matrix with contiguous rows, of bfloat16, or of float32 that is rounded to it where it is read.
template <typename T>
struct MatrixOf {
  const T* at;
  int64_t rows, columns, row;
};
using Matrix = MatrixOf<Half>;

inline __m256i halves_16(__mmask16 some, const Half* from) {
  return _mm256_maskz_loadu_epi16(some, from);
}
inline __m256i halves_16(__mmask16 some, const float* from) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, from));
}

// Rows 2 i and 2 i + 1 from `top`, 16 columns from `left`, as 16 words that hold one of each.
template <typename T>
inline __m512i row_pair(const MatrixOf<T>& m, int64_t top, int64_t left) {
  const __mmask16 some = first_16(m.columns - left);
  const T* at = m.at + top * m.row + left;
  const __m256i zero = _mm256_setzero_si256();
  const __m256i low = top < m.rows ? halves_16(some, at) : zero;
  const __m256i high = top + 1 < m.rows ? halves_16(some, at + m.row) : zero;
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// A tile [16, 32] of the matrix, filled up with zeros, as 16 rows of 16 words.
inline void rows_of(const Matrix& m, int64_t top, int64_t left, __m512i rows[16]) {
  const __mmask32 some = first_32(m.columns - left);
  for (int64_t i = 0; i < kTile; ++i) {
    const Half* at = m.at + (top + i) * m.row + left;
    rows[i] = top + i < m.rows ? _mm512_maskz_loadu_epi16(some, at) : _mm512_setzero_si512();
  }
}

inline int64_t tiles_of(int64_t depth) { return (depth + kDepth - 1) / kDepth; }
inline int64_t blocks_of(int64_t size) { return (size + kSide - 1) / kSide; }

// Panel `index` of b [K, N], of which `row_pair` reads rows. They are a cache line or two each, far apart, which no
// processor foresees.
template <typename M = Matrix>
void pack_panel(const M& b, int64_t index, Half* panel) {
  constexpr int64_t kAhead = 2 * kDepth, kLine = 64 / sizeof *b.at;
  for (int64_t t = 0; t < tiles_of(b.rows); ++t) {
    for (int64_t r = t * kDepth + kAhead; r < std::min(b.rows, (t + 1) * kDepth + kAhead); ++r) {
      const auto* at = b.at + r * b.row + index * kSide;
      for (int64_t j = 0; j < kSide; j += kLine) __builtin_prefetch(at + j);
    }
    for (int64_t half = 0; half < 2; ++half, panel += kTileSize) {
      for (int64_t r = 0; r < kTile; ++r) {
        _mm512_storeu_si512(panel + r * kDepth,
                            row_pair(b, t * kDepth + 2 * r, index * kSide + half * kTile));
      }
    }
  }
}

// Panel `index` of b = m^T, m [N, K] what `rows_of` reads.
template <typename M = Matrix>
void pack_panel_transposed(const M& m, int64_t index, Half* panel) {
  __m512i rows[16];
  for (int64_t t = 0; t < tiles_of(m.columns); ++t) {
    for (int64_t half = 0; half < 2; ++half, panel += kTileSize) {
      rows_of(m, index * kSide + half * kTile, t * kDepth, rows);
      transpose_words(rows);
      for (int64_t r = 0; r < kTile; ++r) _mm512_storeu_si512(panel + r * kDepth, rows[r]);
    }
  }
}

// Block `index` of 32 rows of a [M, K], rows of whole tiles.
inline void pack_rows(const Matrix& a, int64_t index, Half* to) {
  const int64_t width = tiles_of(a.columns) * kDepth;
  __m512i rows[16];
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t left = 0; left < width; left += kDepth) {
      rows_of(a, index * kSide + half * kTile, left, rows);
      for (int64_t i = 0; i < kTile; ++i) {
        _mm512_storeu_si512(to + (half * kTile + i) * width + left, rows[i]);
      }
    }
  }
}

// Block `index` of 32 rows of a = m^T, m [K, M].
inline void pack_rows_transposed(const Matrix& m, int64_t index, Half* to) {
  const int64_t width = tiles_of(m.rows) * kDepth;
  __m512i rows[16];
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t left = 0; left < width; left += kDepth) {
      for (int64_t i = 0; i < kTile; ++i) {
        rows[i] = row_pair(m, left + 2 * i, index * kSide + half * kTile);
      }
      transpose_words(rows);
      for (int64_t i = 0; i < kTile; ++i) {
        _mm512_storeu_si512(to + (half * kTile + i) * width + left, rows[i]);
      }
    }
  }
}

inline void narrow_16(const float* from, __mmask16 some, Half* to) {
  const __m512 wide = _mm512_maskz_loadu_ps(some, from);
  _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(wide));
}

// A row of sums, rounded where it is kept in bfloat16.
inline void put_row(const float* from, int64_t count, Half* to) {
  for (int64_t j = 0; j < count; j += 16) narrow_16(from + j, first_16(count - j), to + j);
}
inline void put_row(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

}  // namespace fornax

#endif  // __AVX512BF16__
#endif  // FORNAX_KERNELS_BFLOAT16_PRODUCT_H_
