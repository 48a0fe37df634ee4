// y = x w for weights that were packed once: float32, bfloat16, few bits with scales, or the blocks of
// GGUF files.
//
// Letters: L layers, M rows, K inputs, N outputs, P panels of 32 outputs, U words of inputs, G groups
// of inputs. x [M, K], y [M, N], values [L, P, U, 32] words, scales and zeros [L, P, G, 32]; an order
// of the inputs [L, K], where the weight's are sorted in another way than those of x. Blocks: a word is
// a record (block_product.h), and layers may be of different types.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "crew.h"
#include "packed_rows.h"

namespace fornax {
namespace {

constexpr int64_t kPass = 480;  // rows that are prepared at once

// The product of x with one weight. Those of a pass differ in type only where they share what x becomes.
struct AnyProduct {
  const int64_t K;
  const int32_t* const order;  // [K]: which input of x comes at each place, or null: as they are

  AnyProduct(int64_t K, const int32_t* order) : K(K), order(order) {}
  virtual ~AnyProduct() = default;

  bool shares_rows(const AnyProduct& other) const {
    if (!order || !other.order) return order == other.order;
    return std::memcmp(order, other.order, K * sizeof *order) == 0;
  }

  // What `count` rows of x become.
  virtual Rows rows(int64_t count) const = 0;
  // Room for preparing a row.
  virtual int64_t floats() const = 0;
  // Makes the rows of one tile ready: each number of all rows, then the next.
  virtual void prepare(const Rows& rows, int64_t first_row, int64_t tile, float* room) const = 0;
  virtual int64_t panels() const = 0;
  // The panels [panel, end) for the tiles [from, to).
  virtual void task(const Rows& rows, int64_t first_row, int64_t from, int64_t to, int64_t panel,
                    int64_t end) const = 0;
};

template <typename Op, typename T>
struct Product final : AnyProduct {
  Matrix<Op> matrix;
  const T* x;
  T* y;

  Product(const Matrix<Op>& matrix, const T* x, const int32_t* order, T* y)
      : AnyProduct(matrix.K, order), matrix(matrix), x(x), y(y) {}

  Rows rows(int64_t count) const override { return matrix.rows(count); }

  int64_t floats() const override { return matrix.line_floats() + (order ? K : 0); }

  void prepare(const Rows& rows, int64_t first_row, int64_t tile, float* room) const override {
    const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
    const Line line = matrix.line(room);
    float* sorted = room + matrix.line_floats();
    for (int64_t i = 0; i < count; ++i) {
      const T* row = x + (first_row + first + i) * K;
      if (order) {
        for (int64_t k = 0; k < K; ++k) sorted[k] = widen(row[order[k]]);
        matrix.prepare(sorted, line);
      } else {
        matrix.prepare(row, line);
      }
      rows.put(line, tile, i);
    }
  }

  int64_t panels() const override { return matrix.panels(); }

  void task(const Rows& rows, int64_t first_row, int64_t from, int64_t to, int64_t panel,
            int64_t end) const override {
    matrix.run(rows, from, to, panel, end, matrix.panel(end),
               y + (first_row + rows.first(from)) * matrix.N);
  }
};

using Products = std::vector<std::unique_ptr<AnyProduct>>;

// Products of the same x with several weights, which share preparing x and the threads.
void pass(ffi::ThreadPool& pool, const std::unique_ptr<AnyProduct>* products, int64_t number,
          int64_t first_row, int64_t count) {
  const AnyProduct& any = *products[0];
  static thread_local Arena prepared;
  Rows rows = any.rows(count);
  prepared.start(rows.floats());
  rows.take(prepared);
  const auto ready = [&](int64_t tile) {
    Arena& arena = Arena::of_this_thread();
    arena.start(any.floats());
    any.prepare(rows, first_row, tile, arena.take(any.floats()));
  };
  if (rows.tiles <= 4) {
    for (int64_t tile = 0; tile < rows.tiles; ++tile) ready(tile);
  } else {
    share_rows(pool, count, rows.tiles, ready);
  }
  int64_t panels = 0;
  for (int64_t i = 0; i < number; ++i) panels += products[i]->panels();
  const int64_t tiles = std::min(rows.tiles, kRowBlock / kTile);
  const int64_t blocks = (rows.tiles + tiles - 1) / tiles;
  const int64_t width = panels_of_task(panels * blocks, pool.num_threads());
  struct Task {
    const AnyProduct* product;
    int64_t from, panel;
  };
  static thread_local std::vector<Task> tasks;
  tasks.clear();
  for (int64_t i = 0; i < number; ++i) {
    for (int64_t from = 0; from < rows.tiles; from += tiles) {
      for (int64_t panel = 0; panel < products[i]->panels(); panel += width) {
        tasks.push_back({products[i].get(), from, panel});
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

// What a call is given: x, then for every weight its values, scales, zeros, the order of its inputs and
// which layer it is, or (blocks) its values, the types of its layers and which layer it is.
struct Call {
  ffi::ThreadPool& pool;
  ffi::AnyBuffer& x;
  ffi::RemainingArgs& weights;
  ffi::RemainingRets& results;
};

ffi::Error run(const Call& call, const Products& products) {
  const int64_t M = call.x.dimensions()[0];
  for (size_t from = 0, to = 0; from < products.size(); from = to) {
    for (to = from + 1; to < products.size() && products[from]->shares_rows(*products[to]);) ++to;
    for (int64_t row = 0; row < M; row += kPass) {
      pass(call.pool, products.data() + from, static_cast<int64_t>(to - from), row,
           std::min(kPass, M - row));
    }
  }
  return ffi::Error::Success();
}

template <typename Op, typename T>
ffi::Error run(const Call& call) {
  const int64_t K = call.x.dimensions()[1];
  Products products;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const auto values = call.weights.get<ffi::AnyBuffer>(5 * i);
    const auto scales = call.weights.get<ffi::AnyBuffer>(5 * i + 1);
    const auto zeros = call.weights.get<ffi::AnyBuffer>(5 * i + 2);
    const auto orders = call.weights.get<Ints>(5 * i + 3);
    const auto layers = call.weights.get<Ints>(5 * i + 4);
    auto y = call.results.get<ffi::AnyBuffer>(i);
    if (!values || !scales || !zeros || !orders || !layers || !y) {
      return ffi::Error::InvalidArgument(
          "a weight is values, scales, zeros, an int32 order and an int32 layer");
    }
    const auto sizes = values->dimensions();
    const int64_t P = sizes[1], U = sizes[2], G = Op::kGrouped ? scales->dimensions()[2] : 0;
    const int64_t layer = std::clamp<int64_t>(layers->typed_data()[0], 0, sizes[0] - 1);
    const int64_t skipped = layer * P * G * kPanel;
    const Matrix<Op> matrix = {
        K,
        (*y)->dimensions()[1],
        U,
        G,
        static_cast<const float*>(values->untyped_data()) + layer * P * U * kPanel,
        static_cast<const char*>(scales->untyped_data()) + skipped * sizeof(typename Op::Scale),
        static_cast<const uint8_t*>(zeros->untyped_data()) + skipped};
    products.push_back(std::make_unique<Product<Op, T>>(
        matrix, static_cast<const T*>(call.x.untyped_data()),
        orders->element_count() ? orders->typed_data() + layer * K : nullptr,
        static_cast<T*>((*y)->untyped_data())));
  }
  return run(call, products);
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

// `use(Op())` for the type of blocks that GGUF files call by this number.
template <typename Use>
bool with_blocks(int32_t type, const Use& use) {
  switch (type) {
    case 2: return use(Q4_0());
    case 6: return use(Q5_0());
    case 8: return use(Q8_0());
    case 12: return use(Q4_K());
    case 13: return use(Q5_K());
    case 14: return use(Q6_K());
    default: return false;
  }
}

// Layers lie behind one another, each of a type of its own.
template <typename T>
ffi::Error run_blocks(const Call& call) {
  const int64_t K = call.x.dimensions()[1];
  Products products;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const auto values = call.weights.get<ffi::AnyBuffer>(3 * i);
    const auto types = call.weights.get<Ints>(3 * i + 1);
    const auto layers = call.weights.get<Ints>(3 * i + 2);
    auto y = call.results.get<ffi::AnyBuffer>(i);
    if (!values || !types || !layers || !y) {
      return ffi::Error::InvalidArgument("a weight is values, int32 types and an int32 layer");
    }
    const int64_t N = (*y)->dimensions()[1], P = (N + kPanel - 1) / kPanel;
    const int64_t layer = std::clamp<int64_t>(layers->typed_data()[0], 0, types->dimensions()[0] - 1);
    const float* at = static_cast<const float*>(values->untyped_data());
    for (int64_t before = 0; before <= layer; ++before) {
      const bool known = with_blocks(types->typed_data()[before], [&](auto op) {
        using Op = decltype(op);
        const int64_t U = K / Op::kInputs;
        if (before == layer) {
          products.push_back(std::make_unique<Product<Op, T>>(
              Matrix<Op>{K, N, U, K / 16, at, nullptr, nullptr},
              static_cast<const T*>(call.x.untyped_data()), nullptr,
              static_cast<T*>((*y)->untyped_data())));
        }
        at += P * U * Op::kStride;
        return true;
      });
      if (!known) return ffi::Error::InvalidArgument("unknown type of blocks");
    }
  }
  return run(call, products);
}

ffi::Error blocks_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                       ffi::RemainingRets results) {
  const Call call{pool, x, weights, results};
  return x.element_type() == ffi::F32 ? run_blocks<float>(call) : run_blocks<Half>(call);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_linear_blocks, fornax::blocks_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());
