// Inner products of rows with the blocks of GGUF files, multiplied as the file stores them.
//
// A record is one block of the file for each of a panel's outputs: 32 or 256 inputs in groups that
// share a scale. It holds the words of a group's integers, group after group, then the scales. The
// integers become bytes on the way to the registers and are multiplied with rows that are rounded to 8
// bits, 32 inputs at a time whatever the block, so that weights of all types share the rounded rows.

#ifndef FORNAX_KERNELS_BLOCK_PRODUCT_H_
#define FORNAX_KERNELS_BLOCK_PRODUCT_H_

#include "quantized_product.h"

namespace fornax {

// float16 to float32. Denormals of float16 are numbers here, even where those of float32 are flushed.
inline Vec load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  typedef uint16_t Few __attribute__((vector_size(kLanes * 2)));
  Few raw;
  std::memcpy(&raw, from, sizeof raw);
  const IntVec all = __builtin_convertvector(raw, IntVec), power = (all >> 10) & 31;
  const IntVec normal = power != 0, fraction = (all & 0x3ff) | (normal & 0x400);
  const IntVec exponent = (power & normal) | (~normal & 1);
  const Vec size = __builtin_convertvector(fraction, Vec) * from_bits((exponent + 102) << 23);
  return from_bits(bits(size) | ((all & 0x8000) << 16));
#endif
}

template <typename T>
Vec load_integers(const T* from) {
  return __builtin_convertvector(widen_bytes(from), Vec);
}

// Eight inputs of a lane's output, a byte each: four, then the next four.
struct EightInputs {
  IntVec first, second;
};

// How the words of a group hold its integers. `open` makes the inputs from 8 * part on.
struct Codes4 {  // 32 inputs: the first four of a word in the lower halves of its bytes
  static constexpr int kInputs = 32;
  static constexpr int kWords = 4;

  static EightInputs open(const float* w, int part) {
    const IntVec word = bits(load(w + part * kPanel));
    return {word & 0x0f0f0f0f, (IntVec)upper_half((Bytes)word)};
  }

  static IntVec add(IntVec acc, IntVec first, IntVec second, const EightInputs& w) {
    return multiply_halves(acc, first, w.first, second, w.second);
  }
};

// `upper`: bits that belong above the lower four, `kBits` for each input: bytes hold those of inputs
// k, k + 4, k + 8 ... from the lowest bits on. Of four inputs from 4 * quad on.
template <int kBits>
IntVec upper_bits(IntVec upper, int quad) {
  constexpr int32_t mask = ((1 << kBits) - 1) * 0x10101010;
  const int up = 4 - kBits * quad;
  return (up >= 0 ? upper << up : upper >> -up) & mask;
}

struct Codes5 : Codes4 {  // then a word of their fifth bits
  static constexpr int kWords = 5;

  static EightInputs open(const float* w, int part) {
    const EightInputs low = Codes4::open(w, part);
    const IntVec upper = bits(load(w + 4 * kPanel));
    return {low.first | upper_bits<1>(upper, 2 * part), low.second | upper_bits<1>(upper, 2 * part + 1)};
  }
};

struct Codes6 : Codes4 {  // 16 inputs: two such words, then one of their upper two bits
  static constexpr int kInputs = 16;
  static constexpr int kWords = 3;

  // Four products of at most 63 * 127 stay below 2^15, as `multiply_halves` wants it.
  static EightInputs open(const float* w, int part) {
    const EightInputs low = Codes4::open(w, part);
    const IntVec upper = bits(load(w + 2 * kPanel));
    return {low.first | upper_bits<2>(upper, 2 * part), low.second | upper_bits<2>(upper, 2 * part + 1)};
  }
};

struct Codes8 {  // 32 inputs: four to a word
  static constexpr int kInputs = 32;
  static constexpr int kWords = 8;

  static EightInputs open(const float* w, int part) {
    return {bits(load(w + 2 * part * kPanel)), bits(load(w + (2 * part + 1) * kPanel))};
  }

  static IntVec add(IntVec acc, IntVec first, IntVec second, const EightInputs& w) {
    return multiply_bytes(multiply_bytes(acc, first, w.first), second, w.second);
  }
};

// Scales of a record, behind its words, for two vectors of outputs. The value of a code is
// scale * (code - kZero), or with offsets scale * code - offset.

template <int kZeroCode>
struct OneScale {  // [kPanel] float16
  static constexpr int kGroups = 1;
  static constexpr int kBytes = 2 * kPanel;
  static constexpr int kZero = kZeroCode;
  static constexpr bool kOffsets = false;
  Vec d[2];

  OneScale(const char* at, int column) {
    const auto* scales = reinterpret_cast<const uint16_t*>(at) + column;
    d[0] = load_float16(scales);
    d[1] = load_float16(scales + kLanes);
  }

  Vec scale(int, int j) const { return d[j]; }
  Vec offset(int, int) const { return Vec{}; }
};

struct ScalesAndOffsets {  // [8, kPanel] of 6 bits each, then the float16 that multiply either
  static constexpr int kGroups = 8;
  static constexpr int kBytes = (2 * kGroups + 4) * kPanel;
  static constexpr int kZero = 0;
  static constexpr bool kOffsets = true;
  const uint8_t* integers;
  Vec d[2], m[2];

  ScalesAndOffsets(const char* at, int column)
      : integers(reinterpret_cast<const uint8_t*>(at) + column) {
    const auto* floats = reinterpret_cast<const uint16_t*>(at + 2 * kGroups * kPanel) + column;
    for (int j = 0; j < 2; ++j) {
      d[j] = load_float16(floats + j * kLanes);
      m[j] = load_float16(floats + kPanel + j * kLanes);
    }
  }

  Vec scale(int g, int j) const { return d[j] * load_integers(integers + g * kPanel + j * kLanes); }
  Vec offset(int g, int j) const {
    return m[j] * load_integers(integers + (kGroups + g) * kPanel + j * kLanes);
  }
};

struct SignedScales {  // [16, kPanel] of 8 bits, then the float16 that multiplies them
  static constexpr int kGroups = 16;
  static constexpr int kBytes = (kGroups + 2) * kPanel;
  static constexpr int kZero = 32;
  static constexpr bool kOffsets = false;
  const int8_t* integers;
  Vec d[2];

  SignedScales(const char* at, int column)
      : integers(reinterpret_cast<const int8_t*>(at) + column) {
    const auto* floats = reinterpret_cast<const uint16_t*>(at + kGroups * kPanel) + column;
    d[0] = load_float16(floats);
    d[1] = load_float16(floats + kLanes);
  }

  Vec scale(int g, int j) const { return d[j] * load_integers(integers + g * kPanel + j * kLanes); }
  Vec offset(int, int) const { return Vec{}; }
};

// A type of blocks. A word of packed_rows.h is a record.
template <typename CodesOf, typename ScalesOf>
struct Blocks : RoundedRows {
  using Codes = CodesOf;
  using Scales = ScalesOf;
  static constexpr bool kBlocks = true;
  static constexpr int64_t kInputs = Codes::kInputs * Scales::kGroups;
  static constexpr int64_t kNumbers = kInputs / 4;
  static constexpr int64_t kBlock = 512 / kInputs;
  static constexpr int64_t kCodes = int64_t{kPanel} * Codes::kWords * Scales::kGroups;  // words
  static constexpr int64_t kStride = kCodes + Scales::kBytes / 4;

  // Scales and totals are those of 16 inputs each; two of them share a scale.
  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t, int64_t, Line line) {
    constexpr int64_t kShared = 32;
    auto* bytes = reinterpret_cast<int8_t*>(line.numbers);
    for (int64_t from = 0; from < inputs; from += kShared) {
      float x[kShared], all;
      for (int64_t k = 0; k < kShared; ++k) x[k] = widen(row[from + k]);
      const float scale = round(x, kShared, bytes + from, &all);
      int32_t half = 0;
      for (int64_t k = 0; k < kShared / 2; ++k) half += bytes[from + k];
      const int64_t g = from / 16;
      line.scales[g] = line.scales[g + 1] = scale;
      line.totals[g] = static_cast<float>(half);
      line.totals[g + 1] = all - static_cast<float>(half);
    }
  }
};

using Q4_0 = Blocks<Codes4, OneScale<8>>;
using Q5_0 = Blocks<Codes5, OneScale<16>>;
using Q8_0 = Blocks<Codes8, OneScale<128>>;  // -128 to 127, stored with 128 added
using Q4_K = Blocks<Codes4, ScalesAndOffsets>;
using Q5_K = Blocks<Codes5, ScalesAndOffsets>;
using Q6_K = Blocks<Codes6, SignedScales>;

// c = (add ? c : 0) + x w for kRows rows and one panel, record by record.
template <typename Op, int kRows>
void multiply_blocks(const Part& p) {
  constexpr int kGroups = Op::Scales::kGroups, kInputs = Op::Codes::kInputs;
  constexpr int kHalves = kInputs / 16;  // of a group, each with a total
  constexpr int kParts = kInputs / 8;
  for (int64_t column = 0; column < kPanel; column += kColumns) {
    Vec sum[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      const float* c = p.c + i * kPanel + column;
      for (int j = 0; j < 2; ++j) sum[i][j] = p.add ? load(c + j * kLanes) : Vec{};
    }
    const float *x = p.x, *x_scale = p.x_scale, *x_total = p.x_total, *record = p.w, *ahead = p.ahead;
    const int64_t step = p.ahead_step / (kGroups * kParts);
    for (int64_t left = p.words; left > 0; --left, record += Op::kStride) {
      const typename Op::Scales scales(reinterpret_cast<const char*>(record + Op::kCodes), column);
      const float* w = record + column;
      for (int g = 0; g < kGroups; ++g, w += Op::Codes::kWords * kPanel) {
        IntVec acc[kRows][2];
        for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = IntVec{};
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part, x += 2 * kRows, ahead += step) {
          // A few lines at a time: more would wait for one another. And as a loop: what is unrolled the
          // compiler gathers at the beginning of the group.
          for (int64_t at = 0; at < step; at += 16) __builtin_prefetch(ahead + at);
          const EightInputs near = Op::Codes::open(w, part), far = Op::Codes::open(w + kLanes, part);
#pragma GCC unroll 12
          for (int i = 0; i < kRows; ++i) {
            const IntVec first = bits(splat_word(x + i)), second = bits(splat_word(x + kRows + i));
            acc[i][0] = Op::Codes::add(acc[i][0], first, second, near);
            acc[i][1] = Op::Codes::add(acc[i][1], first, second, far);
          }
        }
        const Vec scale[2] = {scales.scale(g, 0), scales.scale(g, 1)};
        const Vec offset[2] = {scales.offset(g, 0), scales.offset(g, 1)};
        for (int i = 0; i < kRows; ++i) {
          const float total = kHalves == 2 ? x_total[i] + x_total[i + kRows] : x_total[i];
          for (int j = 0; j < 2; ++j) {
            // All integers below 2^24, so that the difference is exact.
            const Vec exact = __builtin_convertvector(acc[i][j], Vec) -
                              splat(static_cast<float>(Op::Scales::kZero) * total);
            sum[i][j] += exact * (splat(x_scale[i]) * scale[j]);
            if constexpr (Op::Scales::kOffsets) sum[i][j] -= offset[j] * splat(x_scale[i] * total);
          }
        }
        x_scale += kHalves * kRows;
        x_total += kHalves * kRows;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) store(p.c + i * kPanel + column + j * kLanes, sum[i][j]);
    }
  }
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_BLOCK_PRODUCT_H_
