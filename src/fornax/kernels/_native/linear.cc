// y = x w for weights that were packed once: float32, bfloat16, or few bits with scales.
//
// Letters: L layers, M rows, K inputs, N outputs, P panels of 32 outputs, U words of inputs, G groups
// of inputs. x [M, K], y [M, N], values [L, P, U, 32] words, scales and zeros [L, P, G, 32].
//
// Every output is summed in one order, blocks of words one after the other, whatever the number of
// rows and threads: a row's result does not depend on what else is in the batch.

#include <algorithm>
#include <string_view>
#include <vector>

#include "crew.h"
#include "packed_product.h"
#include "quantized_product.h"

namespace fornax {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // rows whose sums fill the registers
#else
constexpr int kTile = 6;
#endif
constexpr int64_t kPass = 480;       // rows that are prepared at once
constexpr int64_t kRowBlock = 240;   // rows of a task: a block of them fits the second cache
constexpr int64_t kPanels = 8;       // most panels of a task
constexpr int64_t kSharing = 4;      // most tiles that share the fetching of the next block

// Rows of x, made ready for the product: tiles of up to kTile rows, each [numbers, rows], of which a
// word of weights takes one or several.
struct Rows {
  int64_t count, numbers, groups, tiles;  // groups: 0 where x is not rounded to integers
  float* values;                          // [tiles][numbers, rows]
  float* scales;                          // [tiles][groups, rows]
  float* totals;                          // [tiles][groups, rows]: sums of a group's integers

  Rows(int64_t count, int64_t numbers, int64_t groups)
      : count(count), numbers(numbers), groups(groups), tiles((count + kTile - 1) / kTile) {}

  // Rows are spread evenly, so that no tile is much smaller than the others.
  int64_t first(int64_t tile) const { return count * tile / tiles; }

  int64_t floats() const { return count * (numbers + 2 * groups) + 3 * kLanes; }

  void take(Arena& arena) {
    values = arena.take(round_up(count * numbers, kLanes));
    scales = arena.take(round_up(count * groups, kLanes));
    totals = arena.take(count * groups);
  }
};

template <typename Op, int kRows = kTile>
void multiply_rows(int64_t rows, const Part& part) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return multiply_rows<Op, kRows - 1>(rows, part);
    if constexpr (Op::kGrouped) {
      multiply_groups<Op, kRows>(part);
    } else {
      multiply<Op, kRows>(part);
    }
  }
}

template <typename Op, typename T>
struct Product {
  int64_t K, N, U, G;
  const T* x;
  const float* w;       // [P, U, kPanel] words
  const char* scales;   // [P, G, kPanel] Op::Scale
  const uint8_t* zeros; // [P, G, kPanel]
  T* y;

  // Makes the rows of one tile ready: each number of all rows, then the next.
  void prepare(const Rows& rows, int64_t first_row, int64_t tile, float* numbers) const {
    const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
    const int64_t groups = rows.groups;
    const Line line{numbers, numbers + rows.numbers, numbers + rows.numbers + groups};
    for (int64_t i = 0; i < count; ++i) {
      Op::prepare(x + (first_row + first + i) * K, K, U, group(), line);
      float* values = rows.values + first * rows.numbers + i;
      for (int64_t n = 0; n < rows.numbers; ++n) values[n * count] = line.numbers[n];
      float* scale = rows.scales + first * groups + i;
      float* total = rows.totals + first * groups + i;
      for (int64_t g = 0; g < groups; ++g) {
        scale[g * count] = line.scales[g];
        total[g * count] = line.totals[g];
      }
    }
  }

  // Words of a group.
  int64_t group() const { return G > 0 ? U / G : U; }

  // What `count` rows of x become.
  Rows rows(int64_t count) const { return Rows(count, U * Op::kNumbers, Op::kRounded ? G : 0); }

  // One block of words of one panel for the tiles [from, to); c is [rows, kPanel].
  void block(const Rows& rows, int64_t from, int64_t to, int64_t panel, int64_t word,
             const float* next, float* c) const {
    const int64_t g = word / group(), at = (panel * G + g) * kPanel;
    Part part;
    part.words = std::min(Op::kBlock, U - word);
    part.w = w + (panel * U + word) * kPanel;
    part.group = group();
    part.w_scale = scales + at * sizeof(typename Op::Scale);
    part.w_zero = zeros + at;
    part.add = word > 0;
    const int64_t sharing = std::min(to - from, kSharing);
    part.ahead_step = kPanel / sharing;
    for (int64_t tile = from; tile < to; ++tile) {
      part.ahead = next + (tile - from) * Op::kBlock * part.ahead_step;
      if (tile - from == kSharing) part.ahead_step = 0;
      const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
      part.x = rows.values + first * rows.numbers + word * Op::kNumbers * count;
      part.x_scale = rows.scales + first * rows.groups + g * count;
      part.x_total = rows.totals + first * rows.groups + g * count;
      part.c = c + (first - rows.first(from)) * kPanel;
      multiply_rows<Op>(count, part);
    }
  }

  void write(const float* c, int64_t row, int64_t count, int64_t panel) const {
    const int64_t column = panel * kPanel, width = std::min(kPanel, N - column);
    for (int64_t i = 0; i < count; ++i) {
      T* to = y + (row + i) * N + column;
      for (int64_t j = 0; j < width; ++j) narrow(c[i * kPanel + j], to + j);
    }
  }

  // Where the block lies that `task` multiplies next.
  const float* after(int64_t panel, int64_t at_once, int64_t p, int64_t word) const {
    if (p + 1 < at_once) return w + ((panel + p + 1) * U + word) * kPanel;
    if (word + Op::kBlock < U) return w + (panel * U + word + Op::kBlock) * kPanel;
    return w + (panel + at_once) * U * kPanel;
  }

  // Some panels for the tiles [from, to). A few rows read each panel from end to end, as memory
  // likes it; many rows go block by block, so that the block of x stays in the second cache.
  void task(const Rows& rows, int64_t first_row, int64_t from, int64_t to, int64_t panel,
            int64_t end) const {
    const int64_t row = rows.first(from), count = rows.first(to) - row;
    const int64_t at_once = count <= 2 * kTile ? 1 : end - panel;
    Arena& arena = Arena::of_this_thread();
    arena.start(at_once * count * kPanel);
    float* c = arena.take(at_once * count * kPanel);
    for (; panel < end; panel += at_once) {
      for (int64_t word = 0; word < U; word += Op::kBlock) {
        for (int64_t p = 0; p < at_once; ++p) {
          block(rows, from, to, panel + p, word, after(panel, at_once, p, word),
                c + p * count * kPanel);
        }
      }
      for (int64_t p = 0; p < at_once; ++p) {
        write(c + p * count * kPanel, first_row + row, count, panel + p);
      }
    }
  }

  int64_t panels() const { return (N + kPanel - 1) / kPanel; }
};

// Products of the same x with several weights, which share preparing x and the threads.
template <typename Op, typename T>
void pass(ffi::ThreadPool& pool, const std::vector<Product<Op, T>>& products, int64_t first_row,
          int64_t count) {
  const Product<Op, T>& any = products.front();
  static thread_local Arena prepared;
  Rows rows = any.rows(count);
  prepared.start(rows.floats());
  rows.take(prepared);
  const auto ready = [&](int64_t tile) {
    Arena& arena = Arena::of_this_thread();
    const int64_t floats = rows.numbers + 2 * rows.groups;
    arena.start(floats);
    any.prepare(rows, first_row, tile, arena.take(floats));
  };
  if (rows.tiles <= 4) {
    for (int64_t tile = 0; tile < rows.tiles; ++tile) ready(tile);
  } else {
    share_rows(pool, count, rows.tiles, ready);
  }
  int64_t panels = 0;
  for (const auto& product : products) panels += product.panels();
  const int64_t tiles = std::min(rows.tiles, kRowBlock / kTile);
  const int64_t blocks = (rows.tiles + tiles - 1) / tiles;
  const int64_t wanted = panels * blocks / (4 * std::max<int64_t>(pool.num_threads(), 1));
  const int64_t width = std::clamp<int64_t>(wanted, 1, kPanels);
  struct Task {
    const Product<Op, T>* product;
    int64_t from, panel;
  };
  static thread_local std::vector<Task> tasks;
  tasks.clear();
  for (const auto& product : products) {
    for (int64_t from = 0; from < rows.tiles; from += tiles) {
      for (int64_t panel = 0; panel < product.panels(); panel += width) {
        tasks.push_back({&product, from, panel});
      }
    }
  }
  const Task* list = tasks.data();  // of this thread, whoever runs the tasks
  share_rows(pool, count, static_cast<int64_t>(tasks.size()), [&, list](int64_t index) {
    const Task& t = list[index];
    t.product->task(rows, first_row, t.from, std::min(t.from + tiles, rows.tiles), t.panel,
                    std::min(t.panel + width, t.product->panels()));
  });
}

using Ints = ffi::Buffer<ffi::S32>;

// What a call is given: x, then for every weight its values, scales, zeros and which layer it is.
struct Call {
  ffi::ThreadPool& pool;
  ffi::AnyBuffer& x;
  ffi::RemainingArgs& weights;
  ffi::RemainingRets& results;
};

template <typename Op, typename T>
ffi::Error run(const Call& call) {
  const int64_t M = call.x.dimensions()[0], K = call.x.dimensions()[1];
  std::vector<Product<Op, T>> products;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const auto values = call.weights.get<ffi::AnyBuffer>(4 * i);
    const auto scales = call.weights.get<ffi::AnyBuffer>(4 * i + 1);
    const auto zeros = call.weights.get<ffi::AnyBuffer>(4 * i + 2);
    const auto layers = call.weights.get<Ints>(4 * i + 3);
    auto y = call.results.get<ffi::AnyBuffer>(i);
    if (!values || !scales || !zeros || !layers || !y) {
      return ffi::Error::InvalidArgument("a weight is values, scales, zeros and an int32 layer");
    }
    const auto sizes = values->dimensions();
    const int64_t P = sizes[1], U = sizes[2], G = Op::kGrouped ? scales->dimensions()[2] : 0;
    const int64_t layer = std::clamp<int64_t>(layers->typed_data()[0], 0, sizes[0] - 1);
    const int64_t skipped = layer * P * G * kPanel;
    products.push_back({K, (*y)->dimensions()[1], U, G,
                        static_cast<const T*>(call.x.untyped_data()),
                        static_cast<const float*>(values->untyped_data()) + layer * P * U * kPanel,
                        static_cast<const char*>(scales->untyped_data()) +
                            skipped * sizeof(typename Op::Scale),
                        static_cast<const uint8_t*>(zeros->untyped_data()) + skipped,
                        static_cast<T*>((*y)->untyped_data())});
  }
  for (int64_t row = 0; row < M; row += kPass) {
    pass(call.pool, products, row, std::min(kPass, M - row));
  }
  return ffi::Error::Success();
}

template <typename Op>
ffi::Error run(const Call& call) {
  return call.x.element_type() == ffi::F32 ? run<Op, float>(call) : run<Op, Half>(call);
}

ffi::Error linear_call(ffi::ThreadPool pool, std::string_view precision, ffi::AnyBuffer x,
                       ffi::RemainingArgs weights, ffi::RemainingRets results) {
  const Call call{pool, x, weights, results};
  if (precision == "float32") return run<Float32>(call);
  if (precision == "bfloat16") return run<BFloat16>(call);
  if (precision == "int8") return run<Int8>(call);
  if (precision == "int4") return run<Int4>(call);
  if (precision == "fp8") return run<Float8>(call);
  if (precision == "mxfp4") return run<Float4>(call);
  return ffi::Error::InvalidArgument("unknown precision");
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_linear, fornax::linear_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<std::string_view>("precision")
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());
