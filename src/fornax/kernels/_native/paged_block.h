// Scores and weighted sums of a block of keys: what attention over pages computes with.
//
// A line is one query head of one token. Every line gets the same additions in the same order,
// however many lines there are.

#ifndef FORNAX_KERNELS_PAGED_BLOCK_H_
#define FORNAX_KERNELS_PAGED_BLOCK_H_

#include <algorithm>
#include <cmath>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace fornax {
namespace {

constexpr int64_t kKeys = 64;  // of a block
constexpr float kLowest = -1e30f;

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

// Lanes of a without the bit `step` in their number and lanes of b with it, each with that `step` away
// added.
template <int step, int... lane>
inline Vec merge(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  const Vec kept = FORNAX_SHUFFLE(a, b, (lane & step ? lane + kLanes : lane)...);
  const Vec added = FORNAX_SHUFFLE(a, b, (lane & step ? lane - step + kLanes : lane + step)...);
  return kept + added;
}

// Of n vectors whose lanes lie `step` apart, n a power of two, the first of each: after all kLanes
// vectors are merged, lane i is the sum of the i-th vector's lanes.
template <int step, int n>
inline Vec merge_all(const Vec (&v)[n]) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    Vec half[n / 2];
    for (int i = 0; i < n / 2; ++i) {
      half[i] = merge<step>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    }
    return merge_all<2 * step>(half);
  }
}

// Asks for the next block, a few lines at a time while one is computed with: of many at once each
// waits for its turn on the way to memory, and all else behind it. In the order of memory: the heads
// of a slot lie side by side, but are used one after the other, which the processor does not foresee.
// And twice, the second time a slot later: a processor that has as many lines on their way as it can
// hold drops what else is asked for.
class Ahead {
 public:
  Ahead() = default;
  // `bytes` from each of `count` addresses, which stay in place until the last is asked for.
  Ahead(const char* const* from, int64_t count, int64_t bytes)
      : from_(from), first_(from), end_(from + count), bytes_(bytes) {}

  template <int kLines>
  void lines() {
    for (int i = 0; i < kLines && from_ < end_; ++i) {
      __builtin_prefetch(*from_ + at_);
      if (from_ > first_) __builtin_prefetch(from_[-1] + at_);
      at_ += 64;
      if (at_ >= bytes_) {
        at_ = 0;
        ++from_;
      }
    }
  }
  void rest() {
    while (from_ < end_) lines<1>();
  }

 private:
  const char *const *from_ = nullptr, *const* first_ = nullptr, *const* end_ = nullptr;
  int64_t bytes_ = 0, at_ = 0;
};

// scores[line * kKeys + j] = queries[line] . keys[j] for j < kLanes.
template <int kRows, typename T>
inline void score_tile(const float* queries, const T* const* keys, int64_t width, float* scores,
                       Ahead& ahead) {
  constexpr int kQuads = kLanes / 4;
  Vec part[kRows][kQuads];
  for (int quad = 0; quad < kQuads; ++quad) {
    Vec acc[kRows][4];
    clear(acc);
    for (int64_t h = 0; h < width; h += kLanes) {
      ahead.lines<sizeof(T)>();
      Vec key[4];
      for (int j = 0; j < 4; ++j) key[j] = load_wide(keys[4 * quad + j] + h);
      for (int i = 0; i < kRows; ++i) {
        const Vec query = load(queries + i * width + h);
        for (int j = 0; j < 4; ++j) acc[i][j] += query * key[j];
      }
    }
    for (int i = 0; i < kRows; ++i) part[i][quad] = merge_all<1>(acc[i]);
  }
  for (int i = 0; i < kRows; ++i) store(scores + i * kKeys, merge_all<4>(part[i]));
}

// At most kRows lines, all in one tile: a key is fetched and widened once for them.
template <int kRows, typename T>
inline void score_rest(int64_t lines, const float* queries, const T* const* keys, int64_t width,
                       float* scores, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (lines < kRows) return score_rest<kRows - 1>(lines, queries, keys, width, scores, ahead);
    score_tile<kRows>(queries, keys, width, scores, ahead);
  }
}

template <typename T>
void score(int64_t lines, int64_t columns, const float* queries, const T* const* keys,
           int64_t width, float* scores, Ahead& ahead) {
  constexpr int kRows = kLanes >= 16 ? 4 : 2;
  for (int64_t j = 0; j < columns; j += kLanes) {
    int64_t i = 0;
    for (; i + kRows <= lines; i += kRows) {
      score_tile<kRows>(queries + i * width, keys + j, width, scores + i * kKeys + j, ahead);
    }
    score_rest<kRows - 1>(lines - i, queries + i * width, keys + j, width, scores + i * kKeys + j,
                          ahead);
  }
}

// to[h * kKeys + j] = rows[j * width + h]; `count` and width are multiples of kLanes.
inline void transpose_keys(const float* rows, int64_t count, int64_t width, float* to) {
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t h = 0; h < width; h += kLanes) {
      Vec v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = load(rows + (j + i) * width + h);
      transpose(v);
      for (int i = 0; i < kLanes; ++i) store(to + (h + i) * kKeys + j, v[i]);
    }
  }
}

template <int kRows, int kVecs>
struct Sums {
  Vec of[kRows][kVecs];
};

template <int kRows, int kVecs>
inline void add(Sums<kRows, kVecs>& to, const Sums<kRows, kVecs>& others) {
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) to.of[i][j] += others.of[i][j];
  }
}

// Has v in a register: GCC would rather load it again for each of its uses.
inline void keep(Vec& v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
}

// The products of kRows queries with kVecs * kLanes keys, summed over `lanes` of every kLanes elements
// from `first` on: in the order of score_tile, which has them side by side.
template <int lanes, int kRows, int kVecs>
inline Sums<kRows, kVecs> sum_lanes(int64_t first, const float* queries, const float* keys,
                                    int64_t width) {
  Sums<kRows, kVecs> sums;
  if constexpr (lanes == 2) {
    Sums<kRows, kVecs> odd;
    clear(sums.of);
    clear(odd.of);
    for (int64_t h = first; h < width; h += kLanes) {
      for (int j = 0; j < kVecs; ++j) {
        Vec key = load(keys + h * kKeys + j * kLanes), next = load(keys + (h + 1) * kKeys + j * kLanes);
        keep(key), keep(next);
        for (int i = 0; i < kRows; ++i) {
          sums.of[i][j] += splat(queries[i * width + h]) * key;
          odd.of[i][j] += splat(queries[i * width + h + 1]) * next;
        }
      }
    }
    add(sums, odd);
  } else {
    sums = sum_lanes<lanes / 2, kRows, kVecs>(first, queries, keys, width);
    add(sums, sum_lanes<lanes / 2, kRows, kVecs>(first + lanes / 2, queries, keys, width));
  }
  return sums;
}

template <int kRows, int kVecs>
inline void score_columns(const float* queries, const float* keys, int64_t width, float* scores) {
  const auto sums = sum_lanes<kLanes, kRows, kVecs>(0, queries, keys, width);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) store(scores + i * kKeys + j * kLanes, sums.of[i][j]);
  }
}

template <int kVecs>
inline void score_lines(int64_t lines, const float* queries, const float* keys, int64_t width,
                        float* scores) {
  constexpr int kRows = kLanes >= 16 ? 2 : 1;
  int64_t i = 0;
  for (; i + kRows <= lines; i += kRows) {
    score_columns<kRows, kVecs>(queries + i * width, keys, width, scores + i * kKeys);
  }
  for (; i < lines; ++i) score_columns<1, kVecs>(queries + i * width, keys, width, scores + i * kKeys);
}

// The bits of `score`, of keys whose elements lie kKeys apart: many lines are worth laying them out so,
// since no vector's lanes are then to be added up.
inline void score_transposed(int64_t lines, int64_t columns, const float* queries, const float* keys,
                             int64_t width, float* scores) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes) {
    score_lines<2>(lines, queries, keys + j, width, scores + j);
  }
  for (; j < columns; j += kLanes) score_lines<1>(lines, queries, keys + j, width, scores + j);
}

// out[line] = out[line] * shrink[line] + sum over keys low..high of weights[line][key] values[key].
template <int kRows, int kVecs, typename T>
inline void gather_tile(int64_t low, int64_t high, const float* weights, const T* const* values,
                        int64_t column, const float* shrink, float* out, int64_t width,
                        Ahead& ahead) {
  Vec acc[kRows][kVecs];
  clear(acc);
  for (int64_t key = low; key < high; ++key) {
    ahead.lines<sizeof(T)>();
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
                        int64_t width, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (lines < kRows) {
      return gather_rest<kRows - 1, kVecs>(lines, low, high, weights, values, column, shrink, out,
                                           width, ahead);
    }
    gather_tile<kRows, kVecs>(low, high, weights, values, column, shrink, out, width, ahead);
  }
}

template <int kVecs, typename T>
inline void gather_panel(int64_t lines, int64_t low, int64_t high, const float* weights,
                         const T* const* values, int64_t column, const float* shrink, float* out,
                         int64_t width, Ahead& ahead) {
  constexpr int kRows = 4;
  int64_t i = 0;
  for (; i + kRows <= lines; i += kRows) {
    gather_tile<kRows, kVecs>(low, high, weights + i * kKeys, values, column, shrink + i,
                              out + i * width, width, ahead);
  }
  gather_rest<kRows - 1, kVecs>(lines - i, low, high, weights + i * kKeys, values, column,
                                shrink + i, out + i * width, width, ahead);
}

template <typename T>
void gather_values(int64_t lines, int64_t low, int64_t high, const float* weights,
                   const T* const* values, const float* shrink, float* out, int64_t width,
                   Ahead& ahead) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWide * kLanes <= width; j += kWide * kLanes) {
    gather_panel<kWide>(lines, low, high, weights, values, j, shrink, out, width, ahead);
  }
  for (; j < width; j += kLanes) {
    gather_panel<1>(lines, low, high, weights, values, j, shrink, out, width, ahead);
  }
}

}  // namespace
}  // namespace fornax

#endif  // FORNAX_KERNELS_PAGED_BLOCK_H_
