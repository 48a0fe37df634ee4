// Products of matrices in float32 arithmetic. Of bfloat16 matrices too, for processors that have no
// instructions for those: an operand is widened where it is copied anyway.
//
// Letters: M rows, K summed over, N columns; c [M, N]. A task is a part of c. For each block of the
// depth a thread copies its parts of a and b into panels, in the order in which they are multiplied,
// so that a transposed operand costs another way to copy and no pass over memory. A panel of b stays
// in the first cache while the panels of a, which lie in the second, are multiplied with it (Goto and
// van de Geijn 2008). An element's sum has one order, which depends on K alone.

#ifndef FORNAX_KERNELS_FLOAT32_PRODUCT_H_
#define FORNAX_KERNELS_FLOAT32_PRODUCT_H_

#include <algorithm>
#include <type_traits>

#include "crew.h"

namespace fornax {
namespace {

constexpr int kHigh = kLanes >= 8 ? 6 : 4;   // rows of c whose sums the registers hold
constexpr int kVecs = kLanes >= 16 ? 4 : 2;  // vectors of such a row
constexpr int64_t kWide = kVecs * kLanes;    // columns of such a row
constexpr int64_t kDepth = 384;              // most of a block
constexpr int64_t kRows = 30 * kHigh;        // whose panels of a fill half of a second cache
constexpr int64_t kColumns = 1536;           // whose panels of b lie in the third
constexpr int64_t kFewest = 128;             // columns of a task, where threads share those of c
constexpr int64_t kTasks = 2;                // of each thread, or it may wait for another
constexpr int64_t kTall = 8 * kRows;         // rows whose float32 sums wait for another block

template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load_wide(from);
  T some[kLanes] = {};
  if (count > 0) std::memcpy(some, from, count * sizeof(T));
  return load_wide(some);
}

// `lines` rows of `count` numbers, `from_row` apart, become `count` lines of `lines` numbers, `to_row` apart. Each
// line is written as a whole vector, zeros behind its last number.
template <typename T>
void copy_across(const T* from, int64_t from_row, int64_t lines, int64_t count, float* to,
                 int64_t to_row) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - j);
    Vec square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      square[i] = i < lines ? load_some(from + i * from_row + j, some) : Vec{};
    }
    transpose(square);
    for (int64_t i = 0; i < some; ++i) store(to + (j + i) * to_row, square[i]);
  }
}

// Where a panel of a has the numbers that are multiplied one after another: its lines are copied whole where
// they are contiguous, and are the depth's where those are.
struct ByRow {
  static int64_t place(int64_t row, int64_t k) { return row * kDepth + k; }
};
struct ByDepth {
  static int64_t place(int64_t row, int64_t k) { return k * kHigh + row; }
};

// `count` numbers of a line, or zeros where it is null.
template <typename T>
void copy_line(const T* from, int64_t count, float* to) {
  if (from == nullptr) {
    std::fill_n(to, count, 0.0f);
  } else if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    for (int64_t k = 0; k < count; k += kLanes) {
      if (k + kLanes <= count) {
        store(to + k, load_wide(from + k));
      } else {
        for (; k < count; ++k) to[k] = widen(from[k]);
      }
    }
  }
}

// Copies a [rows, depth] as panels of kHigh rows, which lie kHigh kDepth apart, zeros behind the last row.
template <typename T>
void copy_a(const Operand<T>& a, int64_t top, int64_t rows, int64_t first, int64_t depth,
            float* to) {
  for (int64_t i = 0; i < rows; i += kHigh, to += kHigh * kDepth) {
    const int64_t some = std::min<int64_t>(kHigh, rows - i);
    const T* from = a.element(top + i, first);
    if (!a.transposed) {
      for (int64_t r = 0; r < kHigh; ++r) {
        copy_line(r < some ? from + r * a.row : nullptr, depth, to + ByRow::place(r, 0));
      }
    } else if (some < kHigh) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t r = 0; r < kHigh; ++r) {
          to[k * kHigh + r] = r < some ? widen(from[k * a.row + r]) : 0;
        }
      }
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t r = 0; r < kHigh; ++r) to[k * kHigh + r] = widen(from[k * a.row + r]);
      }
    }
  }
}

// Copies b [depth, columns] as panels [depth, kWide], zeros behind the last column.
template <typename T>
void copy_b(const Operand<T>& b, int64_t left, int64_t columns, int64_t first, int64_t depth,
            float* to) {
  for (int64_t j = 0; j < columns; j += kWide, to += kWide * depth) {
    const int64_t some = std::min(kWide, columns - j);
    const T* from = b.element(first, left + j);
    for (int64_t v = 0; v < kWide; v += kLanes) {
      if (b.transposed) {
        const int64_t lines = std::clamp<int64_t>(some - v, 0, kLanes);
        copy_across(from + v * b.row, b.row, lines, depth, to + v, kWide);
      } else {
        for (int64_t k = 0; k < depth; ++k) {
          store(to + k * kWide + v, load_some(from + k * b.row + v, some - v));
        }
      }
    }
  }
}

// c [rows, columns] = before, unless that is null, + a panel of a times the first vectors of one of b.
template <typename Places, int vecs, typename To>
void multiply_vectors(int64_t depth, const float* a, const float* b, const float* before,
                      int64_t before_row, To* c, int64_t c_row, int64_t rows, int64_t columns) {
  // They come from memory while the sums are made: without, loads and stores wait for it.
  for (int64_t i = 0; i < std::min<int64_t>(rows, kHigh); ++i) {
    __builtin_prefetch(c + i * c_row, 1);
    if (before != nullptr) __builtin_prefetch(before + i * before_row);
  }
  Vec sums[kHigh][vecs];
  clear(sums);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec line[vecs];
    for (int j = 0; j < vecs; ++j) line[j] = load(b + k * kWide + j * kLanes);
    for (int i = 0; i < kHigh; ++i) {
      const Vec x = splat(a[Places::place(i, k)]);
      for (int j = 0; j < vecs; ++j) sums[i][j] += x * line[j];
    }
  }
  if (rows >= kHigh && columns >= vecs * kLanes) {
    for (int i = 0; i < kHigh; ++i) {
      for (int j = 0; j < vecs; ++j) {
        Vec sum = sums[i][j];
        if (before != nullptr) sum += load(before + i * before_row + j * kLanes);
        store_narrow(c + i * c_row + j * kLanes, sum);
      }
    }
    return;
  }
  alignas(64) float all[kHigh][vecs * kLanes];
  std::memcpy(all, sums, sizeof all);
  for (int64_t i = 0; i < std::min<int64_t>(rows, kHigh); ++i) {
    for (int64_t j = 0; j < std::min<int64_t>(columns, vecs * kLanes); ++j) {
      const float sum = before != nullptr ? before[i * before_row + j] + all[i][j] : all[i][j];
      narrow(sum, c + i * c_row + j);
    }
  }
}

// As many vectors as there are columns of c.
template <typename Places, int vecs = kVecs, typename... Rest>
void multiply(int64_t columns, Rest... rest) {
  if constexpr (vecs > 1) {
    if (columns <= (vecs - 1) * kLanes) return multiply<Places, vecs - 1>(columns, rest...);
  }
  multiply_vectors<Places, vecs>(rest..., columns);
}

// The rows [top, bottom) and columns [left, right) of c = a b + bias, which may be null. Sums of several
// blocks of the depth wait in c where that is float32. Operands are `Operand`, or what else `copy_a` and
// `copy_b` copy.
template <typename Places, typename A, typename B, typename To>
void product_of(const A& a, const B& b, int64_t K, const float* bias, To* c, int64_t c_row,
                int64_t top, int64_t bottom, int64_t left, int64_t right) {
  constexpr bool in_c = std::is_same_v<To, float>;
  const int64_t blocks = (K + kDepth - 1) / kDepth, high = in_c || blocks == 1 ? bottom - top : kTall;
  const int64_t wide = round_up(std::min(kColumns, right - left), kWide);
  const int64_t of_a = kRows * kDepth;
  const int64_t of_sums = in_c || blocks == 1 ? 0 : std::min(high, bottom - top) * wide;
  Arena& arena = Arena::of_this_thread();
  arena.start(of_a + wide * kDepth + of_sums);
  float *panels_a = arena.take(of_a), *panels_b = arena.take(wide * kDepth);
  float* waiting = arena.take(of_sums);
  for (int64_t from = left; from < right; from += kColumns) {
    const int64_t columns = std::min(kColumns, right - from);
    for (int64_t start = top; start < bottom; start += high) {
      To* to = c + start * c_row + from;
      float* sums = waiting;
      int64_t row = wide;
      if constexpr (in_c) sums = to, row = c_row;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = K * block / blocks, depth = K * (block + 1) / blocks - first;
        copy_b(b, from, columns, first, depth, panels_b);
        for (int64_t at = 0; at < std::min(high, bottom - start); at += kRows) {
          const int64_t rows = std::min({kRows, high - at, bottom - start - at});
          copy_a(a, start + at, rows, first, depth, panels_a);
          for (int64_t j = 0; j < columns; j += kWide) {
            for (int64_t i = 0; i < rows; i += kHigh) {
              const float *of_rows = panels_a + i * kDepth, *of_columns = panels_b + j * depth;
              float* sum = sums + (at + i) * row + j;
              const float* of_bias = bias != nullptr ? bias + from + j : nullptr;
              const float* before = block > 0 ? sum : of_bias;
              const int64_t apart = block > 0 ? row : 0;
              if (block + 1 < blocks) {
                multiply<Places>(columns - j, depth, of_rows, of_columns, before, apart, sum, row,
                                 rows - i);
              } else {
                To* out = to + (at + i) * c_row + j;
                multiply<Places>(columns - j, depth, of_rows, of_columns, before, apart, out, c_row,
                                 rows - i);
              }
            }
          }
        }
      }
    }
  }
}

template <typename A, typename... Rest>
void product(const A& a, Rest... rest) {
  a.transposed ? product_of<ByDepth>(a, rest...) : product_of<ByRow>(a, rest...);
}

// c [M, N] = a b + bias by the threads of a pool.
template <typename A, typename B, typename To>
void share_product(ffi::ThreadPool& pool, const A& a, const B& b, int64_t M, int64_t N, int64_t K,
                   const float* bias, To* c) {
  const int64_t threads = pool.num_threads();
  const int64_t tasks = threads == 1 ? 1 : kTasks * threads;
  const int64_t high = std::clamp<int64_t>((M + kRows - 1) / kRows, 1, tasks);
  const int64_t wide = std::clamp<int64_t>((tasks + high - 1) / high, 1,
                                           std::max<int64_t>(1, N / kFewest));
  const auto row = [&](int64_t i) { return std::min(M, round_up(M * i / high, kHigh)); };
  const auto column = [&](int64_t i) { return std::min(N, round_up(N * i / wide, kWide)); };
  share_rows(pool, M, high * wide, [&](int64_t i) {
    product(a, b, K, bias, c, N, row(i / wide), row(i / wide + 1), column(i % wide),
            column(i % wide + 1));
  });
}

}  // namespace
}  // namespace fornax

#endif  // FORNAX_KERNELS_FLOAT32_PRODUCT_H_
