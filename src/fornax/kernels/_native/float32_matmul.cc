// Products of float32 matrices: a b, a b^T and a^T b.
//
// Letters: M rows, K summed over, N columns; c [M, N]. A task is a part of c. For each block of the
// depth a thread copies its parts of a and b into panels, in the order in which they are multiplied,
// so that a transposed operand costs another way to copy and no pass over memory. A panel of b stays
// in the first cache while the panels of a, which lie in the second, are multiplied with it (Goto and
// van de Geijn 2008). An element's sum has one order, which depends on K alone.

#include <algorithm>

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

// A matrix as it lies in memory; element (i, j) of the operand is at[j * row + i] if `transposed`.
struct Operand {
  const float* at;
  int64_t row;
  bool transposed;

  const float* element(int64_t i, int64_t j) const {
    return transposed ? at + j * row + i : at + i * row + j;
  }
};

inline Vec load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Vec v = {};
  if (count > 0) std::memcpy(&v, from, count * sizeof(float));
  return v;
}

// `lines` rows of `count` numbers, `row` apart, become `count` lines of `lines` numbers, `to_row`
// apart. Each line is written as a whole vector, over what comes behind it.
void copy_across(const float* from, int64_t row, int64_t lines, int64_t count, float* to,
                 int64_t to_row) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t some = std::min<int64_t>(kLanes, count - j);
    Vec square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      square[i] = i < lines ? load_some(from + i * row + j, some) : Vec{};
    }
    transpose(square);
    for (int64_t i = 0; i < some; ++i) store(to + (j + i) * to_row, square[i]);
  }
}

// Copies a [rows, depth] as panels [depth, kHigh], zeros behind the last row.
void copy_a(const Operand& a, int64_t top, int64_t rows, int64_t first, int64_t depth, float* to) {
  for (int64_t i = 0; i < rows; i += kHigh, to += kHigh * depth) {
    const int64_t some = std::min<int64_t>(kHigh, rows - i);
    const float* from = a.element(top + i, first);
    if (!a.transposed) {
      copy_across(from, a.row, some, depth, to, kHigh);
    } else if (some < kHigh) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t r = 0; r < kHigh; ++r) to[k * kHigh + r] = r < some ? from[k * a.row + r] : 0;
      }
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        std::memcpy(to + k * kHigh, from + k * a.row, kHigh * sizeof(float));
      }
    }
  }
}

// Copies b [depth, columns] as panels [depth, kWide], zeros behind the last column.
void copy_b(const Operand& b, int64_t left, int64_t columns, int64_t first, int64_t depth,
            float* to) {
  for (int64_t j = 0; j < columns; j += kWide, to += kWide * depth) {
    const int64_t some = std::min(kWide, columns - j);
    const float* from = b.element(first, left + j);
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

// c [rows, columns] = (add ? c : 0) + a panel of a times one of b.
void multiply(int64_t depth, const float* a, const float* b, float* c, int64_t c_row, int64_t rows,
              int64_t columns, bool add) {
  // c comes from memory while the sums are made: without, the stores wait for it.
  for (int64_t i = 0; i < std::min<int64_t>(rows, kHigh); ++i) __builtin_prefetch(c + i * c_row, 1);
  Vec sums[kHigh][kVecs];
  clear(sums);
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec line[kVecs];
    for (int j = 0; j < kVecs; ++j) line[j] = load(b + k * kWide + j * kLanes);
    for (int i = 0; i < kHigh; ++i) {
      const Vec x = splat(a[k * kHigh + i]);
      for (int j = 0; j < kVecs; ++j) sums[i][j] += x * line[j];
    }
  }
  if (rows >= kHigh && columns >= kWide) {
    for (int i = 0; i < kHigh; ++i) {
      for (int j = 0; j < kVecs; ++j) {
        float* to = c + i * c_row + j * kLanes;
        store(to, add ? load(to) + sums[i][j] : sums[i][j]);
      }
    }
    return;
  }
  alignas(64) float all[kHigh][kWide];
  std::memcpy(all, sums, sizeof all);
  for (int64_t i = 0; i < std::min<int64_t>(rows, kHigh); ++i) {
    for (int64_t j = 0; j < std::min(columns, kWide); ++j) {
      float* to = c + i * c_row + j;
      *to = add ? *to + all[i][j] : all[i][j];
    }
  }
}

// The rows [top, bottom) and columns [left, right) of c = a b.
void product(const Operand& a, const Operand& b, int64_t K, float* c, int64_t c_row, int64_t top,
             int64_t bottom, int64_t left, int64_t right) {
  const int64_t blocks = (K + kDepth - 1) / kDepth;
  const int64_t of_a = kRows * kDepth + 16;  // some numbers behind the last are written too
  const int64_t of_b = round_up(std::min(kColumns, right - left), kWide) * kDepth;
  Arena& arena = Arena::of_this_thread();
  arena.start(of_a + of_b);
  float *panels_a = arena.take(of_a), *panels_b = arena.take(of_b);
  for (int64_t from = left; from < right; from += kColumns) {
    const int64_t columns = std::min(kColumns, right - from);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = K * block / blocks, depth = K * (block + 1) / blocks - first;
      copy_b(b, from, columns, first, depth, panels_b);
      for (int64_t high = top; high < bottom; high += kRows) {
        const int64_t rows = std::min(kRows, bottom - high);
        copy_a(a, high, rows, first, depth, panels_a);
        for (int64_t j = 0; j < columns; j += kWide) {
          for (int64_t i = 0; i < rows; i += kHigh) {
            multiply(depth, panels_a + i * depth, panels_b + j * depth,
                     c + (high + i) * c_row + from + j, c_row, rows - i, columns - j, block > 0);
          }
        }
      }
    }
  }
}

ffi::Error call(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b,
                ffi::Result<ffi::Buffer<ffi::F32>> c, int64_t form) {
  const bool left_transposed = form == 2, right_transposed = form == 1;
  const auto of_a = a.dimensions(), of_b = b.dimensions(), of_c = c->dimensions();
  const int64_t M = of_c[0], N = of_c[1], K = of_a[left_transposed ? 0 : 1];
  const Operand from_a = {a.typed_data(), of_a[1], left_transposed};
  const Operand from_b = {b.typed_data(), of_b[1], right_transposed};
  const int64_t threads = pool.num_threads();
  const int64_t tasks = threads == 1 ? 1 : kTasks * threads;
  const int64_t high = std::clamp<int64_t>((M + kRows - 1) / kRows, 1, tasks);
  const int64_t wide = std::clamp<int64_t>((tasks + high - 1) / high, 1,
                                           std::max<int64_t>(1, N / kFewest));
  const auto row = [&](int64_t i) { return std::min(M, round_up(M * i / high, kHigh)); };
  const auto column = [&](int64_t i) { return std::min(N, round_up(N * i / wide, kWide)); };
  share_rows(pool, M, high * wide, [&](int64_t i) {
    product(from_a, from_b, K, c->typed_data(), N, row(i / wide), row(i / wide + 1),
            column(i % wide), column(i % wide + 1));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_float32_matmul, fornax::call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("form"));
