// Inner products of rows with weights that were packed once, in float32 or bfloat16; and what those
// of few bits (quantized_product.h) share with them.
//
// Letters: K inputs, U words of inputs. A word is 4 bytes of a panel, inputs of one output: one
// float32, two bfloat16, four of 8 bits or eight of 4 bits, so that all are one algorithm.

#ifndef FORNAX_KERNELS_PACKED_PRODUCT_H_
#define FORNAX_KERNELS_PACKED_PRODUCT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fornax {

constexpr int64_t kPanel = 32;   // outputs of a panel
constexpr int64_t kBlock = 128;  // words of a block: two of them, of 32 outputs, fit the first cache
constexpr int kColumns = 2 * kLanes;

// A part of a product: where its words lie and what it adds to.
struct Part {
  int64_t words;
  const float* x;        // [numbers, rows]
  const float* w;        // [words, kPanel]
  float* c;              // [rows, kPanel]
  bool add;              // whether c holds the blocks before
  const float* ahead;    // what will be multiplied next, to be fetched meanwhile,
  int64_t ahead_step;    // so many floats for each word
  // Of weights in groups that share a scale:
  int64_t group;         // words of a group
  const float* x_scale;  // [groups, rows]: of x, where it is rounded to integers,
  const float* x_total;  // [groups, rows]: and the sum of those
  const char* w_scale;   // [groups, kPanel] Op::Scale
  const uint8_t* w_zero; // [groups, kPanel]: which code is 0
};

// A row made ready: its numbers, and for every group its scale and the sum of its integers.
struct Line {
  float* numbers;
  float* scales;
  float* totals;
};

// A word in every lane. As an integer: halves of a word may look like a denormal or a signalling
// float, which arithmetic would change.
inline Vec splat_word(const float* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return from_bits(splat(word));
}

// Asks for two lines of the weights.
inline void fetch(const float* lines) {
  __builtin_prefetch(lines);
  __builtin_prefetch(lines + 16);
}

// An operation says how words of a weight are multiplied. Numbers of x lie `rows` apart, from that of
// the row on.
struct Float32 {
  static constexpr int64_t kInputs = 1;   // of a word
  static constexpr int64_t kNumbers = 1;  // of x for a word
  static constexpr int64_t kBlock = fornax::kBlock;
  static constexpr int64_t kStride = kPanel;  // from a word of a panel to the next
  static constexpr bool kGrouped = false;  // whether groups of its inputs have scales
  static constexpr bool kRounded = false;  // whether x is rounded to integers, group by group
  static constexpr bool kBlocks = false;   // whether scales lie among the words
  using Scale = float;

  static Vec add(Vec acc, const float* x, int, Vec w) { return acc + splat_word(x) * w; }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t, int64_t, Line line) {
    for (int64_t k = 0; k < inputs; ++k) line.numbers[k] = widen(row[k]);
  }
};

struct BFloat16 {
  static constexpr int64_t kInputs = 2;
  static constexpr int64_t kBlock = fornax::kBlock;
  static constexpr int64_t kStride = kPanel;
  static constexpr bool kGrouped = false;
  static constexpr bool kRounded = false;
  static constexpr bool kBlocks = false;
  using Scale = float;

#if defined(__AVX512BF16__)
  static constexpr int64_t kNumbers = 1;

  static Vec add(Vec acc, const float* x, int, Vec w) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)splat_word(x));
  }
#else
  static constexpr int64_t kNumbers = 2;  // widened: in the product it would be a third of its work

  static Vec add(Vec acc, const float* x, int rows, Vec w) {
    acc += splat_word(x) * from_bits(bits(w) << 16);
    return acc + splat_word(x + rows) * from_bits(bits(w) & splat(static_cast<int32_t>(0xffff0000)));
  }
#endif

  // `pairs` of inputs, of which those beyond the row's are zeros.
  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t pairs, int64_t, Line line) {
    std::memset(line.numbers, 0, pairs * kNumbers * sizeof *line.numbers);
    for (int64_t k = 0; k < inputs; ++k) {
      Half half;
      narrow(widen(row[k]), &half);
      if constexpr (kNumbers == 2) {
        line.numbers[k] = widen(half);
      } else {
        std::memcpy(reinterpret_cast<char*>(line.numbers) + k * sizeof half, &half, sizeof half);
      }
    }
  }
};

// c = (add ? c : 0) + x w for kRows rows and one panel.
template <typename Op, int kRows>
void multiply(const Part& p) {
  for (int64_t column = 0; column < kPanel; column += kColumns) {
    Vec acc[kRows][2];
    clear(acc);
    const float* x = p.x;
    const float* w = p.w + column;
    const float* ahead = p.ahead;
    for (int64_t u = 0; u < p.words; ++u, x += Op::kNumbers * kRows, w += kPanel) {
      fetch(ahead);
      ahead += p.ahead_step;
      const Vec left = load(w), right = load(w + kLanes);
      for (int i = 0; i < kRows; ++i) {
        acc[i][0] = Op::add(acc[i][0], x + i, kRows, left);
        acc[i][1] = Op::add(acc[i][1], x + i, kRows, right);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      float* c = p.c + i * kPanel + column;
      store(c, p.add ? load(c) + acc[i][0] : acc[i][0]);
      store(c + kLanes, p.add ? load(c + kLanes) + acc[i][1] : acc[i][1]);
    }
  }
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_PACKED_PRODUCT_H_
