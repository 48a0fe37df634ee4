// Products of a group of rows with its matrix: what grouped products and fused experts are made of.
//
// Every product here is c = a b by tasks of some rows and columns of c of one group. A task copies
// blocks of a and b into its thread's second cache, in the order in which they are multiplied, so
// that a transposed operand costs nothing but another way to copy. A group of a few rows reads its
// matrix from end to end instead: then memory is what it waits for. Each element is summed in one
// order that depends on its group alone, whatever the number of threads.

#ifndef FORNAX_KERNELS_GROUPED_PRODUCT_H_
#define FORNAX_KERNELS_GROUPED_PRODUCT_H_

#include <algorithm>
#include <type_traits>
#include <vector>

#include "bfloat16_product.h"
#include "crew.h"
#include "expert_rows.h"

namespace fornax {

constexpr int64_t kFewRows = 12;       // rows up to which a matrix is read where it lies
constexpr int64_t kLineBytes = 4096;   // of a row of such a matrix that are read at once
constexpr int64_t kAheadBytes = 16384;  // that are asked for before they are multiplied, at least
constexpr int64_t kTaskRows = 256;     // most rows of a task
constexpr int64_t kTaskColumns = 256;  // columns that are multiplied at once
constexpr int64_t kFewestColumns = 256;  // of a task, where a group's columns are divided

constexpr int64_t kLine = 64;  // bytes that memory gives at once

// Asks for rows of a matrix while others are multiplied, and behind the last one for the first of
// another matrix: in the order of addresses, as more lines can be on their way so than by what loads
// ask for themselves.
class Ahead {
 public:
  Ahead() = default;
  // `rows` of `bytes` each, `row` bytes apart; then those at `next`, unless it is null.
  Ahead(const void* at, int64_t row, int64_t rows, int64_t bytes, const void* next)
      : at_(static_cast<const char*>(at)),
        next_(static_cast<const char*>(next)),
        row_(row),
        lines_((bytes + kLine - 1) / kLine),
        left_(lines_),
        rows_(rows),
        all_(rows * lines_) {
    if (rows_ == 0) follow();
  }

  // Asks for one more line, and again for that of the row before: a processor that has as many lines
  // on their way as it can hold drops what else is asked for.
  void line() {
    __builtin_prefetch(at_);
    __builtin_prefetch(at_ - row_);
    at_ += kLine;
    if (--left_ == 0) turn();
  }

  // Asks for one of `parts` parts of the rows.
  void part(int64_t parts) {
    for (int64_t i = (all_ + parts - 1) / parts; i > 0; --i) line();
  }

 private:
  void turn() {
    left_ = lines_;
    at_ += row_ - lines_ * kLine;
    if (--rows_ == 0) follow();
  }

  void follow() {
    if (next_) {
      at_ = next_;
    } else {
      at_ -= row_;  // nothing is left: the last row again and again
      row_ = 0;
    }
  }

  const char *at_ = nullptr, *next_ = nullptr;
  int64_t row_ = 0, lines_ = 0, left_ = 0, rows_ = 0, all_ = 0;
};

inline void load_wide(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}
inline void load_wide(const Half* from, int64_t count, float* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = widen(from[j]);
}

// to[j * to_row + i] = from[i * row + j] for i < rows, j < columns.
template <typename T>
void copy_transposed(const T* from, int64_t row, int64_t rows, int64_t columns, float* to,
                     int64_t to_row) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    const int64_t height = std::min<int64_t>(kLanes, rows - i);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int64_t width = std::min<int64_t>(kLanes, columns - j);
      Vec square[kLanes] = {};
      for (int64_t r = 0; r < height; ++r) {
        load_wide(from + (i + r) * row + j, width, reinterpret_cast<float*>(square + r));
      }
      transpose(square);
      for (int64_t c = 0; c < width; ++c) {
        float* line = to + (j + c) * to_row + i;
        std::memcpy(line, square + c, height * sizeof(float));
      }
    }
  }
}

// Products in float32 of either dtype. A block of a is [rows, depth] and, where it is transposed,
// [depth, rows]; one of b is panels [depth, kPanel].
template <typename T>
struct Wide {
  static constexpr int64_t kDepth = 128;  // of a block: a panel of it fits the first cache
  static constexpr int64_t kPanel = (kLanes >= 16 ? 4 : 2) * kLanes;
  static constexpr int64_t kRows = kLanes >= 16 ? 4 : 6;  // that `product` takes at once

  int64_t rows;
  float *a, *b;

  static int64_t padded(int64_t rows) { return round_up(rows, kRows); }
  static int64_t floats(int64_t rows) { return (padded(rows) + kTaskColumns) * kDepth; }

  Wide(Arena& arena, int64_t height)
      : rows(padded(height)),
        a(arena.take(rows * kDepth)),
        b(arena.take(kTaskColumns * kDepth)) {}

  static int64_t panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

  void take_a(const Operand<T>& from, int64_t height, int64_t top, int64_t first, int64_t depth) {
    if (from.transposed) {
      if (height < rows) std::fill(a, a + rows * depth, 0.0f);
      for (int64_t d = 0; d < depth; ++d) {
        load_wide(from.element(top, first + d), height, a + d * rows);
      }
      view_ = {a, 1, rows};
    } else {
      for (int64_t i = 0; i < height; ++i) {
        load_wide(from.element(top + i, first), depth, a + i * depth);
      }
      std::fill(a + height * depth, a + rows * depth, 0.0f);
      view_ = {a, depth, 1};
    }
  }

  void take_b(const Operand<T>& from, int64_t left, int64_t columns, int64_t first, int64_t depth) {
    if (columns % kPanel) {
      std::fill(b + columns / kPanel * kPanel * depth, b + panels(columns) * kPanel * depth, 0.0f);
    }
    if (from.transposed) {
      for (int64_t j = 0; j < columns; j += kPanel) {
        copy_transposed(from.element(first, left + j), from.row, std::min(kPanel, columns - j),
                        depth, b + j * depth, kPanel);
      }
      return;
    }
    for (int64_t d = 0; d < depth; ++d) {
      const T* line = from.element(first + d, left);
      for (int64_t j = 0; j < columns; j += kPanel) {
        load_wide(line + j, std::min(kPanel, columns - j), b + j * depth + d * kPanel);
      }
    }
  }

  // c [panels][rows, kPanel]
  void multiply(int64_t columns, int64_t depth, float* c, bool add, Ahead ahead) const {
    const int64_t parts = panels(columns) * (rows / kRows);
    for (int64_t p = 0; p < panels(columns); ++p) {
      const int64_t width = round_up(std::min(kPanel, columns - p * kPanel), kLanes);
      for (int64_t i = 0; i < rows; i += kRows) {
        ahead.part(parts);
        const View some = {view_.at + i * view_.row, view_.row, view_.column};
        product(kRows, width, depth, some, b + p * kPanel * depth, kPanel,
                c + (p * rows + i) * kPanel, kPanel, add);
      }
    }
  }

 private:
  View view_ = {};
};

#if defined(FORNAX_BFLOAT16_PRODUCTS)
// Products of bfloat16 as such, by tiles or by pairs.
struct Narrow {
  static constexpr int64_t kDepth = 512;
  static constexpr int64_t kPanel = kSide;

  int64_t rows;
  Half *a, *b;

  static int64_t padded(int64_t rows) { return round_up(rows, kSide); }
  static int64_t floats(int64_t rows) { return (padded(rows) + kTaskColumns) * kDepth / 2; }

  Narrow(Arena& arena, int64_t height)
      : rows(padded(height)),
        a(reinterpret_cast<Half*>(arena.take(rows * kDepth / 2))),
        b(reinterpret_cast<Half*>(arena.take(kTaskColumns * kDepth / 2))) {}

  static int64_t panels(int64_t columns) { return blocks_of(columns); }

  void take_a(const Operand<Half>& from, int64_t height, int64_t top, int64_t first,
              int64_t depth) {
    height_ = height;
    const int64_t size = kSide * tiles_of(depth) * fornax::kDepth;
    if (from.transposed) {
      const Matrix m = {from.element(top, first), depth, height, from.row};
      for (int64_t i = 0; i < blocks_of(height); ++i) pack_rows_transposed(m, i, a + i * size);
    } else {
      const Matrix m = {from.element(top, first), height, depth, from.row};
      for (int64_t i = 0; i < blocks_of(height); ++i) pack_rows(m, i, a + i * size);
    }
  }

  // A tile's depth of all panels, then the next: rows are read as far as they go.
  void take_b(const Operand<Half>& from, int64_t left, int64_t columns, int64_t first,
              int64_t depth) {
    const int64_t tiles = tiles_of(depth), size = kSide * tiles * fornax::kDepth;
    if (from.transposed) {
      const Matrix m = {from.element(first, left), columns, depth, from.row};
      for (int64_t p = 0; p < panels(columns); ++p) pack_panel_transposed(m, p, b + p * size);
      return;
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t top = t * fornax::kDepth;
      const Matrix m = {from.element(first + top, left), std::min(depth - top, fornax::kDepth),
                        columns, from.row};
      for (int64_t p = 0; p < panels(columns); ++p) {
        pack_panel(m, p, b + p * size + 2 * t * kTileSize);
      }
    }
  }

  void multiply(int64_t columns, int64_t depth, float* c, bool add, Ahead ahead) const {
    const int64_t tiles = tiles_of(depth), width = tiles * fornax::kDepth;
    alignas(64) float sums[kSide * kSide];
    const Tiles registers;
    const int64_t parts = panels(columns) * (rows / kSide);
    for (int64_t i = 0; i < rows; i += kSide) {
      for (int64_t p = 0; p < panels(columns); ++p) {
        ahead.part(parts);
        float* to = c + (p * rows + i) * kSide;
        float* into = add ? sums : to;
        block_product(tiles, a + i * width, width, b + p * kSide * width, into, kSide,
                      height_ - i);
        if (!add) continue;
        for (int64_t j = 0; j < kSide * kSide; j += kLanes) {
          store(to + j, load(to + j) + load(sums + j));
        }
      }
    }
  }

 private:
  int64_t height_ = 0;
};
#endif

inline void put_line(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}
inline void put_line(const float* from, int64_t count, Half* to) {
#if defined(FORNAX_BFLOAT16_PRODUCTS)
  for (int64_t j = 0; j < count; j += 16) narrow_16(from + j, first_16(count - j), to + j);
#else
  for (int64_t j = 0; j < count; ++j) narrow(from[j], to + j);
#endif
}

// The same product for a few rows of a and a matrix b that is not transposed, which is read from end
// to end, some rows at once. Sums are those of `Engine`, block of depth by block, to the last bit.

// a as numbers, c as vectors of floats; of bfloat16 a vector of the even columns and one of the odd.
template <typename T>
struct WideLines {
  using Engine = Wide<T>;
  static constexpr bool kPairs = std::is_same_v<T, Half>;
  static constexpr int kVecs = kPairs ? 2 : 1;
  static constexpr int64_t kStep = kVecs * kLanes;
  static constexpr int64_t kRowsOfB = 1;          // that one number of a is multiplied with
  static constexpr int kDeep = 8, kLastDeep = 1;  // numbers of a taken at once, and of the rest
  static constexpr int kMostRows = 6;             // lines of c whose sums the registers hold

  static int64_t numbers(int64_t depth) { return depth; }
  static void prepare(const T* line, int64_t depth, float* a) { load_wide(line, depth, a); }

  // Adds kDeep rows of b, times the numbers of a for them, to kRows lines of c.
  template <int kRows, int kDeep>
  static void add(const float* a, int64_t a_row, const T* b, int64_t b_row, int64_t, int64_t columns,
                  float* c, int64_t c_row, Ahead* ahead) {
    int64_t j = 0;
    for (; j + kStep <= columns; j += kStep) {
      if (j * sizeof(T) % kLine == 0) {
        for (int d = 0; ahead && d < kDeep; ++d) ahead->line();
      }
      step<kRows, kDeep>(a, a_row, b + j, b_row, c + j, c_row);
    }
    if (j == columns) return;
    T rest[kDeep][kStep] = {};
    for (int d = 0; d < kDeep; ++d) {
      std::memcpy(rest[d], b + d * b_row + j, (columns - j) * sizeof(T));
    }
    step<kRows, kDeep>(a, a_row, rest[0], kStep, c + j, c_row);
  }

  template <int kRows, int kDeep>
  static void step(const float* a, int64_t a_row, const T* b, int64_t b_row, float* c,
                   int64_t c_row) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sums[r][v] = load(c + r * c_row + v * kLanes);
    }
    for (int d = 0; d < kDeep; ++d) {
      __builtin_prefetch(b + (d + kDeep) * b_row);  // from the second cache
      const Vec words = load(reinterpret_cast<const float*>(b + d * b_row));
      for (int r = 0; r < kRows; ++r) {
        const Vec x = splat(a[r * a_row + d]);
        if constexpr (kPairs) {
          sums[r][0] += x * from_bits(bits(words) << 16);
          sums[r][1] += x * from_bits(bits(words) & splat(static_cast<int32_t>(0xffff0000)));
        } else {
          sums[r][0] += x * words;
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) store(c + r * c_row + v * kLanes, sums[r][v]);
    }
  }

  template <typename Out>
  static void put(const float* line, int64_t columns, Out* to) {
    if constexpr (kPairs) {
      for (int64_t j = 0; j < columns; ++j) {
        narrow(line[j / kStep * kStep + j % 2 * kLanes + j % kStep / 2], to + j);
      }
    } else {
      put_line(line, columns, to);
    }
  }
};

#if defined(FORNAX_BFLOAT16_PRODUCTS)
// Puts a line whose every 32 columns are two vectors: 16 of them by `first`, then those 8 lanes on.
template <typename Out>
void put_merged(float* line, int64_t columns, __m512i first, Out* to) {
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t j = 0; j < columns; j += 32) {
    const __m512 low = _mm512_loadu_ps(line + j), high = _mm512_loadu_ps(line + j + 16);
    _mm512_storeu_ps(line + j, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(line + j + 16, _mm512_permutex2var_ps(low, second, high));
  }
  put_line(line, columns, to);
}

// a as pairs of bfloat16, each for two rows of b, whose columns are interleaved in lanes of 128 bits.
struct NarrowLines {
  using Engine = Narrow;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kRowsOfB = 2;
  static constexpr int kDeep = 8, kLastDeep = 1;
  static constexpr int kMostRows = 6;

  static int64_t numbers(int64_t depth) { return (depth + 1) / 2; }
  static void prepare(const Half* line, int64_t depth, float* a) {
    if (depth % 2) a[depth / 2] = 0;
    std::memcpy(a, line, depth * sizeof(Half));
  }

  // `rows` is how many rows of b there are: of the last pair one may be missing.
  template <int kRows, int kDeep>
  static void add(const float* a, int64_t a_row, const Half* b, int64_t b_row, int64_t rows,
                  int64_t columns, float* c, int64_t c_row, Ahead* ahead) {
    for (int64_t j = 0; j < columns; j += kStep) {
      for (int d = 0; ahead && d < 2 * kDeep; ++d) ahead->line();
      const __mmask32 some = first_32(columns - j);
      __m512 sums[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_loadu_ps(c + r * c_row + j + v * 16);
      }
      for (int d = 0; d < kDeep; ++d) {
        const Half* at = b + 2 * d * b_row + j;
        const __m512i even = _mm512_maskz_loadu_epi16(some, at);
        const __m512i odd = 2 * d + 1 < rows ? _mm512_maskz_loadu_epi16(some, at + b_row)
                                             : _mm512_setzero_si512();
        const auto low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
        const auto high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        for (int r = 0; r < kRows; ++r) {
          int32_t pair;
          std::memcpy(&pair, a + r * a_row + d, sizeof pair);
          const auto x = (__m512bh)_mm512_set1_epi32(pair);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, low);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, high);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) _mm512_storeu_ps(c + r * c_row + j + v * 16, sums[r][v]);
      }
    }
  }

  template <typename Out>
  static void put(float* line, int64_t columns, Out* to) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    put_merged(line, columns, first, to);
  }
};

// Sums as AMX tiles make them (Intel's manual, TDPBF16PS): within a tile's depth even and odd rows
// of b apart, then both together are added; denormal numbers are zero.
struct TileLines {
  using Engine = Narrow;
  static constexpr int64_t kStep = 32;
  static constexpr int64_t kRowsOfB = 1;
  static constexpr int kDeep = fornax::kDepth, kLastDeep = kDeep;
  static constexpr int kMostRows = 4;
  static constexpr int kSoon = 8;  // rows of b that come from the second cache to the first ahead

  static int64_t numbers(int64_t depth) { return tiles_of(depth) * kDeep; }
  static void prepare(const Half* line, int64_t depth, float* a) {
    load_wide(line, depth, a);
    std::fill(a + depth, a + numbers(depth), 0.0f);
  }

  template <int kRows, int>
  static void add(const float* a, int64_t a_row, const Half* b, int64_t b_row, int64_t rows,
                  int64_t columns, float* c, int64_t c_row, Ahead* ahead) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    for (int64_t j = 0; j < columns; j += kStep) {
      const __mmask32 some = first_32(columns - j);
      __m512 sums[kRows][2][2];  // rows of b that are even and odd, then columns
      for (auto& row : sums) row[0][0] = row[0][1] = row[1][0] = row[1][1] = _mm512_setzero_ps();
      for (int d = 0; d < kDeep; d += 2) {
        for (int odd = 0; odd < 2; ++odd) {
          const Half* at = b + (d + odd) * b_row + j;
          if (ahead) ahead->line();
          _mm_prefetch(reinterpret_cast<const char*>(at + kSoon * b_row), _MM_HINT_T0);
          const __m512i words =
              d + odd < rows ? _mm512_maskz_loadu_epi16(some, at) : _mm512_setzero_si512();
          const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
          const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(words, high_half));
          for (int r = 0; r < kRows; ++r) {
            const __m512 x = _mm512_set1_ps(a[r * a_row + d + odd]);
            sums[r][odd][0] = _mm512_fmadd_ps(x, low, sums[r][odd][0]);
            sums[r][odd][1] = _mm512_fmadd_ps(x, high, sums[r][odd][1]);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) {
          float* to = c + r * c_row + j + v * 16;
          const __m512 tile = _mm512_add_ps(sums[r][0][v], sums[r][1][v]);
          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), tile));
        }
      }
    }
  }

  template <typename Out>
  static void put(float* line, int64_t columns, Out* to) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    put_merged(line, columns, first, to);
  }
};
#endif

template <typename T>
struct EngineOf {
  using Type = Wide<T>;
};
#if defined(FORNAX_BFLOAT16_PRODUCTS)
template <>
struct EngineOf<Half> {
  using Type = Narrow;
};
#endif

// Adds kDeep numbers' rows of b to `rows` lines of c, to as many at once as registers hold sums for.
template <typename Lines, int kDeep, int kRows, typename T>
void add_lines(int64_t rows, const float* a, int64_t a_row, const T* b, int64_t b_row,
               int64_t rows_of_b, int64_t columns, float* c, int64_t c_row, Ahead* ahead) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_row, c += kRows * c_row, ahead = nullptr) {
    Lines::template add<kRows, kDeep>(a, a_row, b, b_row, rows_of_b, columns, c, c_row, ahead);
  }
  if constexpr (kRows > 1) {
    if (rows == 0) return;
    add_lines<Lines, kDeep, kRows - 1>(rows, a, a_row, b, b_row, rows_of_b, columns, c, c_row,
                                       ahead);
  }
}

// One product c [rows, columns] = a b, summed over `depth`; c in rows `c_row` apart. `next` is where
// the thread is likely to read b after this product, or null.
template <typename T, typename Out = T>
struct Product {
  Operand<T> a, b;
  int64_t depth;
  Out* c;
  int64_t c_row;
  const T* next = nullptr;

  void run(int64_t top, int64_t bottom, int64_t left, int64_t right) const {
    if (bottom - top > kFewRows || b.transposed || a.transposed) {
      run_blocks(top, bottom, left, right);
#if defined(FORNAX_BFLOAT16_PRODUCTS)
    } else if constexpr (std::is_same_v<T, Half>) {
      if (has_tiles()) {
        run_lines<TileLines>(top, bottom, left, right);
      } else {
        run_lines<NarrowLines>(top, bottom, left, right);
      }
#endif
    } else {
      run_lines<WideLines<T>>(top, bottom, left, right);
    }
  }

 private:
  using Engine = typename EngineOf<T>::Type;

  static int64_t bytes_of(int64_t elements) { return elements * sizeof(T); }
  int64_t row_bytes() const { return bytes_of(b.row); }

  void run_blocks(int64_t top, int64_t bottom, int64_t left, int64_t right) const {
    const int64_t height = bottom - top;
    Arena& arena = Arena::of_this_thread();
    const int64_t room = Engine::padded(height) * kTaskColumns;
    arena.start(Engine::floats(height) + room);
    Engine engine(arena, height);
    float* sums = arena.take(room);
    for (; left < right; left += kTaskColumns) {
      const int64_t columns = std::min(kTaskColumns, right - left);
      for (int64_t first = 0; first < depth; first += Engine::kDepth) {
        const int64_t some = std::min(Engine::kDepth, depth - first);
        engine.take_a(a, height, top, first, some);
        engine.take_b(b, left, columns, first, some);
        engine.multiply(columns, some, sums, first > 0, after(left, right, first));
      }
      for (int64_t i = 0; i < height; ++i) {
        Out* line = c + (top + i) * c_row + left;
        for (int64_t j = 0; j < columns; j += Engine::kPanel) {
          put_line(sums + (j * engine.rows) + i * Engine::kPanel,
                   std::min(Engine::kPanel, columns - j), line + j);
        }
      }
    }
  }

  // The block of b that is copied after this one.
  Ahead after(int64_t left, int64_t right, int64_t first) const {
    first += Engine::kDepth;
    if (first >= depth) {
      first = 0;
      left += kTaskColumns;
    }
    if (left >= right) return {};
    const int64_t some = std::min(Engine::kDepth, depth - first);
    const int64_t columns = std::min(kTaskColumns, right - left);
    const int64_t width = b.transposed ? some : columns, rows = b.transposed ? columns : some;
    return {b.element(first, left), row_bytes(), rows, bytes_of(width), nullptr};
  }

  template <typename Lines>
  void run_lines(int64_t top, int64_t bottom, int64_t left, int64_t right) const {
    static_assert(std::is_same_v<typename Lines::Engine, Engine>, "their sums are compared");
    constexpr int64_t kColumns = kLineBytes / sizeof(T);
    const int64_t rows = bottom - top, numbers = Lines::numbers(depth);
    const int64_t line = round_up(std::min(kColumns, right - left), Lines::kStep);
    Arena& arena = Arena::of_this_thread();
    arena.start(rows * (2 * line + numbers));
    const Room room = {arena.take(rows * line), arena.take(rows * line),
                       arena.take(rows * numbers)};
    for (int64_t i = 0; i < rows; ++i) {
      Lines::prepare(a.element(top + i, 0), depth, room.numbers + i * numbers);
    }
    for (; left < right; left += kColumns) {
      const int64_t columns = std::min(kColumns, right - left);
      add_columns<Lines>(rows, left, columns, left + columns < right, room);
      for (int64_t i = 0; i < rows; ++i) {
        Lines::put(room.sums + i * round_up(columns, Lines::kStep), columns,
                   c + (top + i) * c_row + left);
      }
    }
  }

  struct Room {
    float *sums, *part, *numbers;
  };

  template <typename Lines>
  void add_columns(int64_t rows, int64_t left, int64_t columns, bool more, const Room& room) const {
    constexpr int kDeep = Lines::kDeep, kLast = Lines::kLastDeep;
    constexpr int64_t kBlock = Engine::kDepth / Lines::kRowsOfB;
    const int64_t numbers = Lines::numbers(depth), line = round_up(columns, Lines::kStep);
    const int64_t bytes = bytes_of(columns);
    const int64_t distance = std::max<int64_t>(kDeep * Lines::kRowsOfB, kAheadBytes / bytes);
    const int64_t asked = std::min(distance, depth);
    Ahead ahead(b.element(asked, left), row_bytes(), depth - asked, bytes,
                more ? b.element(0, left + columns) : next);
    for (int64_t first = 0; first < numbers; first += kBlock) {
      const int64_t end = std::min(numbers, first + kBlock);
      float* into = first > 0 ? room.part : room.sums;
      std::fill(into, into + rows * line, 0.0f);
      for (int64_t d = first; d < end;) {
        const int64_t row = d * Lines::kRowsOfB, rest = depth - row;
        const bool deep = d + kDeep <= end && rest >= kDeep * Lines::kRowsOfB;
        const auto add = deep ? add_lines<Lines, kDeep, Lines::kMostRows, T>
                              : add_lines<Lines, kLast, Lines::kMostRows, T>;
        add(rows, room.numbers + d, numbers, b.element(row, left), b.row, rest, columns, into, line,
            &ahead);
        d += deep ? kDeep : kLast;
      }
      if (first == 0) continue;
      for (int64_t i = 0; i < rows * line; i += kLanes) {
        store(room.sums + i, load(room.sums + i) + load(room.part + i));
      }
    }
  }
};

// Rows and columns of the result of one product.
struct Task {
  int64_t group, top, bottom, left, right;
};

// Divides each product's rows evenly into blocks, and its columns where the tasks would be too few
// to share.
class Tasks {
 public:
  void add(int64_t group, int64_t rows, int64_t columns) {
    const int64_t parts = (rows + kTaskRows - 1) / kTaskRows;
    for (int64_t i = 0; i < parts; ++i) {
      all_.push_back({group, rows * i / parts, rows * (i + 1) / parts, 0, columns});
    }
  }

  const std::vector<Task>& divided(int64_t threads) {
    const int64_t wanted = 4 * threads, count = static_cast<int64_t>(all_.size());
    if (threads == 1 || count == 0 || count >= wanted) return all_;
    const int64_t columns = all_.front().right;
    const int64_t parts =
        std::clamp<int64_t>(columns / kFewestColumns, 1, (wanted + count - 1) / count);
    std::vector<Task> found;
    for (const Task& t : all_) {
      for (int64_t i = 0; i < parts; ++i) {
        const auto edge = [&](int64_t part) {
          return part == parts ? columns : columns * part / parts / 64 * 64;
        };
        found.push_back({t.group, t.top, t.bottom, edge(i), edge(i + 1)});
      }
    }
    all_ = std::move(found);
    return all_;
  }

 private:
  std::vector<Task> all_;
};

}  // namespace fornax

#endif  // FORNAX_KERNELS_GROUPED_PRODUCT_H_
