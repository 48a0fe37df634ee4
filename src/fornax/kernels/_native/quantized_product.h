// Inner products of rows with weights of few bits, whose inputs lie in groups that share a scale.
//
// Integers of 8 and 4 bits are multiplied with rows that are rounded to 8 bits, group by group: a
// group's sum is an integer, and is scaled when it is complete. Floats of 8 bits (e4m3) and 4 (e2m1)
// become bfloat16, which holds all of them, and are multiplied with rows rounded to that.

#ifndef FORNAX_KERNELS_QUANTIZED_PRODUCT_H_
#define FORNAX_KERNELS_QUANTIZED_PRODUCT_H_

#include <cmath>

#include "packed_product.h"

namespace fornax {

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));

// The upper four bits of each byte. Shifts of 16 bits: processors have none of 8.
inline Bytes upper_half(Bytes bytes) { return (Bytes)((Shorts)bytes >> 4) & 0x0f; }

// The sum of the products of each lane's two signed 16-bit numbers.
inline IntVec multiply_pairs(IntVec a, IntVec b) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
  return (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// acc + the products of each lane's four bytes, unsigned in w and signed in x.
inline IntVec multiply_bytes(IntVec acc, IntVec x, IntVec w) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
  // As 16-bit numbers: no sum of two products leaves 32 bits.
  typedef int16_t Signed __attribute__((vector_size(kLanes * 4)));
  const IntVec x_even = (IntVec)((Signed)((Shorts)x << 8) >> 8), x_odd = (IntVec)((Signed)x >> 8);
  const IntVec w_even = (IntVec)((Shorts)w & 0xff), w_odd = (IntVec)((Shorts)w >> 8);
  return acc + multiply_pairs(x_even, w_even) + multiply_pairs(x_odd, w_odd);
#endif
}

// The same for numbers below 16: `low` with `first`, `high` with `second`.
inline IntVec multiply_halves(IntVec acc, IntVec first, IntVec low, IntVec second, IntVec high) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
  return multiply_bytes(multiply_bytes(acc, first, low), second, high);
#elif defined(__AVX512BW__)
  // Four products of at most 15 * 127 stay far below 2^15, where this instruction would saturate.
  const auto sums = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)low, (__m512i)first),
                                     _mm512_maddubs_epi16((__m512i)high, (__m512i)second));
  return acc + multiply_pairs((IntVec)sums, splat(0x00010001));
#else
  const auto sums = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)low, (__m256i)first),
                                     _mm256_maddubs_epi16((__m256i)high, (__m256i)second));
  return acc + multiply_pairs((IntVec)sums, splat(0x00010001));
#endif
}

// Bytes as integers of 32 bits. GCC 12 takes what `__builtin_convertvector` says apart, lane by lane.
inline IntVec widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint8_t Few __attribute__((vector_size(kLanes)));
  Few bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
#endif
}

inline IntVec widen_bytes(const int8_t* from) {
  return (widen_bytes(reinterpret_cast<const uint8_t*>(from)) << 24) >> 24;
}

// Rows rounded to 8 bits.
struct RoundedRows {
  static constexpr int64_t kStride = kPanel;
  static constexpr bool kGrouped = true;
  static constexpr bool kRounded = true;
  static constexpr bool kBlocks = false;
  static constexpr int64_t kLargestGroup = 128;  // inputs
  using Scale = float;
  using Sum = IntVec;

  static Vec scale(const float* from) { return load(from); }

  // Rounds a row group by group. What is not finite makes the group's scale so, never a number.
  template <typename T>
  static void round(const T* row, int64_t inputs, int64_t group, int64_t groups, Line line) {
    auto* bytes = reinterpret_cast<int8_t*>(line.numbers);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * group, count = std::clamp<int64_t>(inputs - from, 0, group);
      float x[kLargestGroup] = {};
      for (int64_t k = 0; k < count; ++k) x[k] = widen(row[from + k]);
      line.scales[g] = round(x, group, bytes + from, line.totals + g);
    }
  }

  static float round(const float* x, int64_t group, int8_t* to, float* total) {
    Vec top = {}, poison = {};
    for (int64_t k = 0; k < group; k += kLanes) {
      const Vec v = load(x + k);
      top = maximum(top, maximum(v, -v));
      poison += v * 0.0f;
    }
    const float most = highest(top), scale = most / 127 + sum(poison);
    const float inverse = most > 0 && scale > 0 && std::isfinite(1 / scale) ? 1 / scale : 0;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    int32_t all = 0;
    for (int64_t k = 0; k < group; ++k) {
      const float shifted = x[k] * inverse + shift;
      int32_t rounded;
      std::memcpy(&rounded, &shifted, sizeof rounded);
      to[k] = static_cast<int8_t>(rounded - 0x4b400000);
      all += to[k];
    }
    *total = static_cast<float>(all);
    return scale;
  }
};

// Integers from -128 to 127, stored with 128 added, because processors multiply unsigned with signed
// bytes.
struct Int8 : RoundedRows {
  static constexpr int64_t kInputs = 4;
  static constexpr int64_t kNumbers = 1;
  static constexpr int64_t kBlock = fornax::kBlock;
  static constexpr bool kZeros = false;

  static Vec zero(const uint8_t*) { return splat(128.0f); }

  static IntVec open(IntVec word) { return word; }

  static IntVec add(IntVec acc, const float* x, int, IntVec w) {
    return multiply_bytes(acc, bits(splat_word(x)), w);
  }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words, int64_t group, Line line) {
    round(row, inputs, group * kInputs, words / group, line);
  }
};

// Codes from 0 to 15; every group says which of them is 0. The bytes of a word hold four inputs in
// their lower halves, and the next four in their upper ones.
struct Int4 : RoundedRows {
  static constexpr int64_t kInputs = 8;
  static constexpr int64_t kNumbers = 2;
  static constexpr int64_t kBlock = fornax::kBlock;
  static constexpr bool kZeros = true;  // whether groups say which code is 0

  static Vec zero(const uint8_t* from) { return __builtin_convertvector(widen_bytes(from), Vec); }

  struct Halves {
    IntVec low, high;
  };

  static Halves open(IntVec word) { return {word & 0x0f0f0f0f, (IntVec)upper_half((Bytes)word)}; }

  static IntVec add(IntVec acc, const float* x, int rows, const Halves& w) {
    const IntVec first = bits(splat_word(x)), second = bits(splat_word(x + rows));
    return multiply_halves(acc, first, w.low, second, w.high);
  }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words, int64_t group, Line line) {
    round(row, inputs, group * kInputs, words / group, line);
  }
};

// A byte of `table` for every byte of `index`, which is below 16.
inline Bytes look_up(const uint8_t (&table)[16], Bytes index) {
#if defined(__AVX512BW__)
  const auto bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (Bytes)_mm512_shuffle_epi8(bytes, (__m512i)index);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const auto bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (Bytes)_mm256_shuffle_epi8(bytes, (__m256i)index);
#elif defined(__SSSE3__) && !defined(__AVX__)
  return (Bytes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), (__m128i)index);
#elif defined(__aarch64__)
  return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
#else
  Bytes found;
  for (int i = 0; i < kLanes * 4; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// Two words of bfloat16, of which bytes 0 and 2 of a lane are the first, 1 and 3 the second.
struct Pairs {
  Vec first, second;

  Pairs(Bytes upper, Bytes lower)
      : first((Vec)(((Shorts)upper << 8) | ((Shorts)lower & 0x00ff))),
        second((Vec)(((Shorts)upper & 0xff00) | ((Shorts)lower >> 8))) {}

  Vec multiply(Vec acc, const float* x, int rows) const {
    acc = BFloat16::add(acc, x, rows, first);
    return BFloat16::add(acc, x + BFloat16::kNumbers * rows, rows, second);
  }
};

// Rows rounded to bfloat16.
struct HalfRows {
  static constexpr int64_t kStride = kPanel;
  static constexpr bool kGrouped = true;
  static constexpr bool kRounded = false;
  static constexpr bool kBlocks = false;
  using Sum = Vec;
  static constexpr bool kZeros = false;

  static Vec zero(const uint8_t*) { return Vec{}; }
};

// e4m3: sign, four bits of exponent (bias 7), three of fraction; no infinities, one NaN. The bytes of
// a word hold its inputs in the order 0, 2, 1, 3.
struct Float8 : HalfRows {
  static constexpr int64_t kInputs = 4;
  static constexpr int64_t kNumbers = 2 * BFloat16::kNumbers;
  static constexpr int64_t kBlock = fornax::kBlock / BFloat16::kNumbers;
  using Scale = float;

  static Vec scale(const float* from) { return load(from); }

  static Vec add(Vec acc, const float* x, int rows, const Pairs& w) {
    return w.multiply(acc, x, rows);
  }

  // bfloat16 has eight bits of exponent with bias 127: 120 more, and 120 is even, so that the lowest
  // bit stays as it is. Below 2^-5 the lower half of a code, n, stands for n 2^-9.
  static Pairs open(IntVec word) {
    static constexpr uint8_t kUpper[16] = {0x00, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                           0x80, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};
    static constexpr uint8_t kSmallUpper[16] = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                                0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
    static constexpr uint8_t kSmallLower[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,
                                                0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
    const Bytes code = (Bytes)word, low = code & 0x0f;
    const Bytes small = (Bytes)((code & 0x70) == 0), nan = (Bytes)((code & 0x7f) == 0x7f);
    const Bytes upper = look_up(kUpper, upper_half(code)) | (look_up(kSmallUpper, low) & small);
    const Bytes lower = (look_up(kSmallLower, low) & small) | ((Bytes)((Shorts)low << 4) & ~small);
    return {upper | (nan & 0x7f), lower};
  }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words, int64_t group, Line line) {
    BFloat16::prepare(row, inputs, 2 * words, group, line);
  }
};

// e2m1, the element of MXFP4: sign, 0 0.5 1 1.5 2 3 4 6; a group's scale is a power of two, e8m0. The
// bytes of a word hold inputs 0, 2, 1, 3 in their lower halves and 4, 6, 5, 7 in their upper ones.
struct Float4 : HalfRows {
  static constexpr int64_t kInputs = 8;
  static constexpr int64_t kNumbers = 4 * BFloat16::kNumbers;
  static constexpr int64_t kBlock = fornax::kBlock / 2 / BFloat16::kNumbers;
  using Scale = uint8_t;

  // 2^(code - 127); code 0, a denormal, counts as 0, and 255 is NaN.
  static Vec scale(const uint8_t* from) {
    const IntVec code = widen_bytes(from);
    return from_bits((code << 23) | ((code == 255) & (1 << 22)));
  }

  struct Halves {
    Pairs low, high;
  };

  static Halves open(IntVec word) {
    return {wide((Bytes)word & 0x0f), wide(upper_half((Bytes)word))};
  }

  static Vec add(Vec acc, const float* x, int rows, const Halves& w) {
    return w.high.multiply(w.low.multiply(acc, x, rows), x + kNumbers / 2 * rows, rows);
  }

  static Pairs wide(Bytes code) {
    static constexpr uint8_t kUpper[16] = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                           0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    static constexpr uint8_t kLower[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                                           0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
    return {look_up(kUpper, code), look_up(kLower, code)};
  }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words, int64_t group, Line line) {
    BFloat16::prepare(row, inputs, 4 * words, group, line);
  }
};

// Asks for what `kColumns` outputs of a group share.
template <typename Op>
void fetch_shared(const typename Op::Scale* scales, const uint8_t* zeros) {
  for (int i = 0; i < kColumns; i += 64 / sizeof *scales) __builtin_prefetch(scales + i);
  if constexpr (Op::kZeros) __builtin_prefetch(zeros);
}

// c = (add ? c : 0) + x w for kRows rows and one panel, group by group.
template <typename Op, int kRows>
void multiply_groups(const Part& p) {
  if (!p.add) std::fill(p.c, p.c + kRows * kPanel, 0.0f);
  const int64_t next = Op::kBlock / p.group * kPanel;  // to the scales of the next block
  for (int64_t column = 0; column < kPanel; column += kColumns) {
    const float* x = p.x;
    const float* w = p.w + column;
    const float* ahead = p.ahead;
    for (int64_t word = 0, g = 0; word < p.words; word += p.group, ++g) {
      typename Op::Sum acc[kRows][2];
      for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = typename Op::Sum{};
      const int64_t words = std::min(p.group, p.words - word);
      for (int64_t u = 0; u < words; ++u, x += Op::kNumbers * kRows, w += kPanel) {
        fetch(ahead);
        ahead += p.ahead_step;
        const auto left = Op::open(bits(load(w))), right = Op::open(bits(load(w + kLanes)));
#pragma GCC unroll 12
        for (int i = 0; i < kRows; ++i) {
          acc[i][0] = Op::add(acc[i][0], x + i, kRows, left);
          acc[i][1] = Op::add(acc[i][1], x + i, kRows, right);
        }
      }
      const int64_t at = g * kPanel + column;
      const auto* scales = reinterpret_cast<const typename Op::Scale*>(p.w_scale) + at;
      fetch_shared<Op>(scales + next, p.w_zero + at + next);
      const Vec scale[2] = {Op::scale(scales), Op::scale(scales + kLanes)};
      const Vec zero[2] = {Op::zero(p.w_zero + at), Op::zero(p.w_zero + at + kLanes)};
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < 2; ++j) {
          float* c = p.c + i * kPanel + column + j * kLanes;
          if constexpr (Op::kRounded) {
            // All integers below 2^24, so that the difference is exact.
            const Vec exact = __builtin_convertvector(acc[i][j], Vec) -
                              zero[j] * splat(p.x_total[g * kRows + i]);
            store(c, load(c) + exact * (splat(p.x_scale[g * kRows + i]) * scale[j]));
          } else {
            store(c, load(c) + acc[i][j] * scale[j]);
          }
        }
      }
    }
  }
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_QUANTIZED_PRODUCT_H_
