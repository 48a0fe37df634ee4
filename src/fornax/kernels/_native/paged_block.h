// Scores and weighted sums of a block of keys: what attention over pages computes with.
//
// A line is one query head of one token. Every line gets the same additions in the same order,
// however many lines there are.

#ifndef FORNAX_KERNELS_PAGED_BLOCK_H_
#define FORNAX_KERNELS_PAGED_BLOCK_H_

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"

namespace fornax {
namespace {

constexpr int64_t kKeys = 64;  // of a block
constexpr float kLowest = -1e30f;

typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

inline Vec load_wide(const float* from) { return load(from); }
inline Vec load_wide(const Half* from) {
  HalfVec narrow_;
  std::memcpy(&narrow_, from, sizeof narrow_);
  return from_bits(__builtin_convertvector(narrow_, IntVec) << 16);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FORNAX_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(FORNAX_SHUFFLE)
#define FORNAX_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// a[from], b[from], a[from + 1], b[from + 1], ...
template <int from, int... lane>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  return FORNAX_SHUFFLE(a, b, (lane % 2 * kLanes + from + lane / 2)...);
}

template <int by, int... lane>
inline Vec rotate(Vec v, std::integer_sequence<int, lane...>) {
  return FORNAX_SHUFFLE(v, v, ((lane + by) % kLanes)...);
}

// All lanes of v combined, two halves at a time.
template <int half = kLanes / 2, typename Combine>
inline float fold(Vec v, const Combine& combine) {
  v = combine(v, rotate<half>(v, std::make_integer_sequence<int, kLanes>()));
  if constexpr (half > 1) {
    return fold<half / 2>(v, combine);
  } else {
    return v[0];
  }
}

// Sums of the lanes of each of the n vectors, the first vector's in the lanes 0, n, 2 n, ... of which
// there remain kLanes / n to add. Which lanes are added when does not depend on n.
template <int n>
inline Vec add_lanes(Vec (&v)[n]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  for (int half = n / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) {
      v[i] = zip<0>(v[i], v[i + half], lanes) + zip<kLanes / 2>(v[i], v[i + half], lanes);
    }
  }
  return v[0];
}

// scores[line * kKeys + j] = queries[line] . keys[j] for j < kLanes.
template <int kRows, typename T>
inline void score_tile(const float* queries, const T* const* keys, int64_t width, float* scores) {
  constexpr int kQuads = kLanes / 4;
  Vec part[kRows][kQuads];
  for (int quad = 0; quad < kQuads; ++quad) {
    Vec acc[kRows][4] = {};
    for (int64_t h = 0; h < width; h += kLanes) {
      Vec key[4];
      for (int j = 0; j < 4; ++j) key[j] = load_wide(keys[quad + j * kQuads] + h);
      for (int i = 0; i < kRows; ++i) {
        const Vec query = load(queries + i * width + h);
        for (int j = 0; j < 4; ++j) acc[i][j] += query * key[j];
      }
    }
    for (int i = 0; i < kRows; ++i) part[i][quad] = add_lanes(acc[i]);
  }
  for (int i = 0; i < kRows; ++i) store(scores + i * kKeys, add_lanes(part[i]));
}

// At most kRows lines, all in one tile: a key is fetched and widened once for them.
template <int kRows, typename T>
inline void score_rest(int64_t lines, const float* queries, const T* const* keys, int64_t width,
                       float* scores) {
  if constexpr (kRows > 0) {
    if (lines < kRows) return score_rest<kRows - 1>(lines, queries, keys, width, scores);
    score_tile<kRows>(queries, keys, width, scores);
  }
}

template <typename T>
void score(int64_t lines, int64_t columns, const float* queries, const T* const* keys,
           int64_t width, float* scores) {
  constexpr int kRows = kLanes >= 16 ? 4 : 2;
  for (int64_t j = 0; j < columns; j += kLanes) {
    int64_t i = 0;
    for (; i + kRows <= lines; i += kRows) {
      score_tile<kRows>(queries + i * width, keys + j, width, scores + i * kKeys + j);
    }
    score_rest<kRows - 1>(lines - i, queries + i * width, keys + j, width, scores + i * kKeys + j);
  }
}

// out[line] = out[line] * shrink[line] + sum over keys low..high of weights[line][key] values[key].
template <int kRows, int kVecs, typename T>
inline void gather_tile(int64_t low, int64_t high, const float* weights, const T* const* values,
                        int64_t column, const float* shrink, float* out, int64_t width) {
  Vec acc[kRows][kVecs] = {};
  for (int64_t key = low; key < high; ++key) {
    Vec line[kVecs];
    for (int j = 0; j < kVecs; ++j) line[j] = load_wide(values[key] + column + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec x = splat(weights[i * kKeys + key]);
      for (int j = 0; j < kVecs; ++j) acc[i][j] += x * line[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      float* to = out + i * width + column + j * kLanes;
      store(to, load(to) * splat(shrink[i]) + acc[i][j]);
    }
  }
}

template <int kRows, int kVecs, typename T>
inline void gather_rest(int64_t lines, int64_t low, int64_t high, const float* weights,
                        const T* const* values, int64_t column, const float* shrink, float* out,
                        int64_t width) {
  if constexpr (kRows > 0) {
    if (lines < kRows) {
      return gather_rest<kRows - 1, kVecs>(lines, low, high, weights, values, column, shrink, out,
                                           width);
    }
    gather_tile<kRows, kVecs>(low, high, weights, values, column, shrink, out, width);
  }
}

template <int kVecs, typename T>
inline void gather_panel(int64_t lines, int64_t low, int64_t high, const float* weights,
                         const T* const* values, int64_t column, const float* shrink, float* out,
                         int64_t width) {
  constexpr int kRows = 4;
  int64_t i = 0;
  for (; i + kRows <= lines; i += kRows) {
    gather_tile<kRows, kVecs>(low, high, weights + i * kKeys, values, column, shrink + i,
                              out + i * width, width);
  }
  gather_rest<kRows - 1, kVecs>(lines - i, low, high, weights + i * kKeys, values, column,
                                shrink + i, out + i * width, width);
}

template <typename T>
void gather_values(int64_t lines, int64_t low, int64_t high, const float* weights,
                   const T* const* values, const float* shrink, float* out, int64_t width) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWide * kLanes <= width; j += kWide * kLanes) {
    gather_panel<kWide>(lines, low, high, weights, values, j, shrink, out, width);
  }
  for (; j < width; j += kLanes) {
    gather_panel<1>(lines, low, high, weights, values, j, shrink, out, width);
  }
}

}  // namespace
}  // namespace fornax

#endif  // FORNAX_KERNELS_PAGED_BLOCK_H_
