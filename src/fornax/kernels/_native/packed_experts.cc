// Rows in groups, each multiplied by the packed matrix of its group, and layers of packed experts.
//
// Letters: L layers, M rows or tokens, E groups or experts, K inputs, N outputs, D width, F width of an
// expert, k experts of a token, A = M k; values [L, E, P, U, 32] words, scales and zeros [L, E, P, G, 32]
// as in packed_rows.h. Codes of a matrix are read once for up to 240 rows of its group, those of a group
// without rows never.

#include <memory>
#include <string_view>
#include <vector>

#include "activation.h"
#include "expert_rows.h"
#include "packed_rows.h"

namespace fornax {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

// The matrices of one layer.
template <typename Op>
struct Stack {
  int64_t E, K, N, P, U, G;
  const float* values;
  const char* scales;
  const uint8_t* zeros;

  Stack(const ffi::AnyBuffer& values, const ffi::AnyBuffer& scales, const ffi::AnyBuffer& zeros,
        int64_t layer, int64_t K, int64_t N)
      : E(values.dimensions()[1]),
        K(K),
        N(N),
        P(values.dimensions()[2]),
        U(values.dimensions()[3]),
        G(scales.dimensions()[3]) {
    layer = std::clamp<int64_t>(layer, 0, values.dimensions()[0] - 1);
    this->values = static_cast<const float*>(values.untyped_data()) + layer * E * P * U * kPanel;
    this->scales = static_cast<const char*>(scales.untyped_data()) +
                   layer * E * P * G * kPanel * sizeof(typename Op::Scale);
    this->zeros = static_cast<const uint8_t*>(zeros.untyped_data());
    if (Op::kZeros) this->zeros += layer * E * P * G * kPanel;
  }

  Matrix<Op> of(int64_t e) const {
    const int64_t shared = e * P * G * kPanel;
    return {K, N, U, G, values + e * P * U * kPanel, scales + shared * sizeof(typename Op::Scale),
            Op::kZeros ? zeros + shared : zeros};
  }
};

// The rows of one group.
struct Group {
  int64_t expert, row;  // its matrix, and its first row
  Rows rows;
};

// Some tiles of a group.
struct Block {
  const Group* group;
  int64_t from, to;

  int64_t row() const { return group->row + group->rows.first(from); }
};

// The groups that have rows.
template <typename Op>
std::vector<Group> groups_of(const Stack<Op>& stack, const std::vector<int64_t>& edge) {
  std::vector<Group> found;
  for (int64_t e = 0; e < stack.E; ++e) {
    if (edge[e + 1] > edge[e]) {
      found.push_back({e, edge[e], stack.of(e).rows(edge[e + 1] - edge[e])});
    }
  }
  return found;
}

void take_rows(std::vector<Group>& groups, Arena& arena) {
  for (Group& group : groups) group.rows.take(arena);
}

int64_t floats_of(const std::vector<Group>& groups) {
  int64_t floats = 0;
  for (const Group& group : groups) floats += group.rows.floats();
  return floats;
}

// Each group's tiles by so many.
std::vector<Block> blocks_of(const std::vector<Group>& groups, int64_t tiles) {
  std::vector<Block> found;
  for (const Group& group : groups) {
    for (int64_t from = 0; from < group.rows.tiles; from += tiles) {
      found.push_back({&group, from, std::min(from + tiles, group.rows.tiles)});
    }
  }
  return found;
}

constexpr int64_t kBlockTiles = kRowBlock / kTile;

// work(group, tile) for all tiles of all groups, whose rows have so many elements together.
template <typename Work>
void each_tile(ffi::ThreadPool& pool, const std::vector<Group>& groups, int64_t elements,
               const Work& work) {
  const std::vector<Block> tiles = blocks_of(groups, 1);
  share_evenly(pool, static_cast<int64_t>(tiles.size()), elements,
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) work(*tiles[i].group, tiles[i].from);
               });
}

template <typename Op, typename T>
void multiply(ffi::ThreadPool& pool, const Stack<Op>& stack, const T* x, const int32_t* sizes,
              int64_t M, T* y) {
  const std::vector<int64_t> edge = edges(sizes, stack.E, M);
  std::vector<Group> groups = groups_of(stack, edge);
  static thread_local Arena prepared;
  prepared.start(floats_of(groups));
  take_rows(groups, prepared);
  each_tile(pool, groups, M * stack.K, [&](const Group& group, int64_t tile) {
    const Matrix<Op> matrix = stack.of(group.expert);
    Arena& arena = Arena::of_this_thread();
    arena.start(matrix.line_floats());
    const Line line = matrix.line(arena.take(matrix.line_floats()));
    const int64_t first = group.rows.first(tile), last = group.rows.first(tile + 1);
    for (int64_t i = first; i < last; ++i) {
      matrix.prepare(x + (group.row + i) * stack.K, line);
      group.rows.put(line, tile, i - first);
    }
  });
  const std::vector<Block> blocks = blocks_of(groups, kBlockTiles);
  const int64_t count = static_cast<int64_t>(blocks.size());
  const int64_t width = panels_of_task(count * stack.P, pool.num_threads());
  const int64_t parts = (stack.P + width - 1) / width, threads = pool.num_threads();
  const auto panels = [&](int64_t task) {
    return stack.of(blocks[task / parts].group->expert).panel(task % parts * width);
  };
  share_rows(pool, M, count * parts, [&](int64_t task) {
    const Block& block = blocks[task / parts];
    const Matrix<Op> matrix = stack.of(block.group->expert);
    const int64_t panel = task % parts * width, end = std::min(panel + width, stack.P);
    const float* next = task + threads < count * parts ? panels(task + threads) : matrix.panel(panel);
    matrix.run(block.group->rows, block.from, block.to, panel, end, next, y + block.row() * stack.N);
  });
  std::memset(static_cast<void*>(y + edge[stack.E] * stack.N), 0,
              (M - edge[stack.E]) * stack.N * sizeof(T));
}

// Experts of one layer; biases are null where there are none.
template <typename Op>
struct Layer {
  Stack<Op> gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;
  Activation activation;
};

// What a call is given of its tokens, and room for their products in the order of experts.
struct Tokens {
  int64_t count, chosen;
  const float *x, *weights;
  const int32_t* experts;
  bool weigh_input;
  float *gates, *ups, *outputs, *y;  // [A, F] twice, [A, D], [M, D]
};

// The rows that experts take in: prepared once for each token, then put where their experts want them.
template <typename Op>
void prepare_inputs(ffi::ThreadPool& pool, const Layer<Op>& layer, const Tokens& tokens,
                    const int32_t* order, std::vector<Group>& groups, Arena& arena) {
  const int64_t k = tokens.chosen, A = tokens.count * k, D = layer.gate.K;
  const Matrix<Op> any = layer.gate.of(0);
  const int64_t each = round_up(any.line_floats(), kLanes);
  const int64_t lines = tokens.weigh_input ? A : tokens.count;
  arena.start(lines * each + floats_of(groups));
  float* at = arena.take(lines * each);
  share_evenly(pool, lines, lines * D, [&](int64_t first, int64_t last) {
    Arena& own = Arena::of_this_thread();
    own.start(D);
    float* weighed = own.take(D);
    for (int64_t i = first; i < last; ++i) {
      const float* row = tokens.x + (tokens.weigh_input ? i / k : i) * D;
      if (tokens.weigh_input) {
        for (int64_t j = 0; j < D; ++j) weighed[j] = row[j] * tokens.weights[i];
        row = weighed;
      }
      any.prepare(row, any.line(at + i * each));
    }
  });
  const auto line = [&](int64_t row) {
    return any.line(at + (tokens.weigh_input ? order[row] : order[row] / k) * each);
  };
  std::vector<Group> several;
  for (Group& group : groups) {
    if (group.rows.count == 1) {  // a tile of one row is its line
      const Line only = line(group.row);
      group.rows.values = only.numbers;
      group.rows.scales = only.scales;
      group.rows.totals = only.totals;
    } else {
      group.rows.take(arena);
      several.push_back(group);
    }
  }
  each_tile(pool, several, A * D, [&](const Group& group, int64_t tile) {
    const int64_t first = group.rows.first(tile), last = group.rows.first(tile + 1);
    for (int64_t i = first; i < last; ++i) group.rows.put(line(group.row + i), tile, i - first);
  });
}

// Makes hidden rows of gates and ups, once all columns of a block are there, and prepares them.
template <typename Op>
void activate(const Layer<Op>& layer, const Tokens& tokens, const Block& block,
              const Rows& hidden) {
  const int64_t F = layer.gate.N, e = block.group->expert;
  const Matrix<Op> down = layer.down.of(e);
  Arena& arena = Arena::of_this_thread();
  arena.start(down.line_floats());
  const Line line = down.line(arena.take(down.line_floats()));
  for (int64_t tile = block.from; tile < block.to; ++tile) {
    const int64_t first = hidden.first(tile), last = hidden.first(tile + 1);
    for (int64_t i = first; i < last; ++i) {
      float* gate = tokens.gates + (block.group->row + i) * F;
      float* up = tokens.ups + (block.group->row + i) * F;
      if (layer.gate_bias) add_line(gate, layer.gate_bias + e * F, F);
      if (layer.up_bias) add_line(up, layer.up_bias + e * F, F);
      layer.activation.run(gate, up, F);
      down.prepare(gate, line);
      hidden.put(line, tile, i - first);
    }
  }
}

template <typename Op>
void run_experts(ffi::ThreadPool& pool, const Layer<Op>& layer, const Tokens& tokens) {
  const int64_t M = tokens.count, k = tokens.chosen, A = M * k, threads = pool.num_threads();
  const int64_t E = layer.gate.E, D = layer.down.N, F = layer.gate.N;
  std::vector<int32_t> order(A), inverse(A), sizes(E);
  order_rows(tokens.experts, A, E, order.data(), inverse.data(), sizes.data());
  const std::vector<int64_t> edge = edges(sizes.data(), E, A);
  static thread_local Arena prepared_in, prepared_out;
  std::vector<Group> in = groups_of(layer.gate, edge), out = groups_of(layer.down, edge);
  prepare_inputs(pool, layer, tokens, order.data(), in, prepared_in);
  prepared_out.start(floats_of(out));
  take_rows(out, prepared_out);
  const std::vector<Block> blocks = blocks_of(in, kBlockTiles), outs = blocks_of(out, kBlockTiles);
  const int64_t count = static_cast<int64_t>(blocks.size());
  // Of a block the tasks of gate come first, then those of up; who ends last makes the hidden rows.
  const int64_t wide = panels_of_task(2 * count * layer.gate.P, threads);
  const int64_t parts = (layer.gate.P + wide - 1) / wide, into = count * 2 * parts;
  const int64_t wide_out = panels_of_task(count * layer.down.P, threads);
  const int64_t parts_out = (layer.down.P + wide_out - 1) / wide_out, from = count * parts_out;
  const auto matrix = [&](int64_t task) {
    const int64_t e = blocks[task / (2 * parts)].group->expert;
    return (task / parts % 2 ? layer.up : layer.gate).of(e);
  };
  // Where the thread that has task i of both loops is likely to read after it.
  const auto next = [&](int64_t i) -> const float* {
    i += threads;
    if (i < into) return matrix(i).panel(i % parts * wide);
    i -= into;
    const int64_t task = i < from ? i : 0;
    return layer.down.of(blocks[task / parts_out].group->expert).panel(task % parts_out * wide_out);
  };
  const std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[count]);
  for (int64_t b = 0; b < count; ++b) left[b] = 2 * parts;
  share_rows(pool, M, into, [&](int64_t i) {
    const Block& block = blocks[i / (2 * parts)];
    const Matrix<Op> weight = matrix(i);
    const int64_t panel = i % parts * wide;
    weight.run(block.group->rows, block.from, block.to, panel, std::min(panel + wide, layer.gate.P),
               next(i), (i / parts % 2 ? tokens.ups : tokens.gates) + block.row() * F);
    if (--left[i / (2 * parts)] == 0) {
      activate(layer, tokens, block, outs[i / (2 * parts)].group->rows);
    }
  });
  share_rows(pool, M, from, [&](int64_t i) {
    const Block& block = outs[i / parts_out];
    const int64_t e = block.group->expert, panel = i % parts_out * wide_out;
    const int64_t end = std::min(panel + wide_out, layer.down.P);
    float* to = tokens.outputs + block.row() * D;
    layer.down.of(e).run(block.group->rows, block.from, block.to, panel, end, next(into + i), to);
    const int64_t rows = block.group->rows.first(block.to) - block.group->rows.first(block.from);
    const int64_t left_edge = panel * kPanel, columns = std::min(end * kPanel, D) - left_edge;
    for (int64_t r = 0; layer.down_bias && r < rows; ++r) {
      add_line(to + r * D + left_edge, layer.down_bias + e * D + left_edge, columns);
    }
  });
  sum_outputs(pool, M, k, D, inverse.data(), edge[E], tokens.outputs,
              tokens.weigh_input ? nullptr : tokens.weights, tokens.y);
}

// Calls `work` with the operation of a precision.
template <typename Work>
ffi::Error by_precision(std::string_view precision, const Work& work) {
  if (precision == "int8") {
    work(Int8());
  } else if (precision == "int4") {
    work(Int4());
  } else if (precision == "fp8") {
    work(Float8());
  } else if (precision == "mxfp4") {
    work(Float4());
  } else {
    return ffi::Error::InvalidArgument("unknown precision");
  }
  return ffi::Error::Success();
}

ffi::Error multiply_call(ffi::ThreadPool pool, std::string_view precision, ffi::AnyBuffer x,
                         ffi::AnyBuffer values, ffi::AnyBuffer scales, ffi::AnyBuffer zeros,
                         Ints sizes, ffi::BufferR0<ffi::S32> layer,
                         ffi::Result<ffi::AnyBuffer> y) {
  return by_precision(precision, [&](auto op) {
    using Op = decltype(op);
    const int64_t M = x.dimensions()[0];
    const Stack<Op> stack(values, scales, zeros, *layer.typed_data(), x.dimensions()[1],
                          y->dimensions()[1]);
    const auto run = [&](auto* to) {
      using T = std::remove_pointer_t<decltype(to)>;
      multiply(pool, stack, static_cast<const T*>(x.untyped_data()), sizes.typed_data(), M, to);
    };
    if (x.element_type() == ffi::F32) {
      run(static_cast<float*>(y->untyped_data()));
    } else {
      run(static_cast<Half*>(y->untyped_data()));
    }
  });
}

ffi::Error experts_call(ffi::ThreadPool pool, std::string_view precision, Floats x, Floats weights,
                        Ints experts, ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer gate,
                        ffi::AnyBuffer gate_scales, ffi::AnyBuffer gate_zeros, ffi::AnyBuffer up,
                        ffi::AnyBuffer up_scales, ffi::AnyBuffer up_zeros, ffi::AnyBuffer down,
                        ffi::AnyBuffer down_scales, ffi::AnyBuffer down_zeros, Floats gate_bias,
                        Floats up_bias, Floats down_bias, ffi::ResultBuffer<ffi::F32> y,
                        ffi::ResultBuffer<ffi::F32> gates, ffi::ResultBuffer<ffi::F32> ups,
                        ffi::ResultBuffer<ffi::F32> outputs, bool gelu, float clip, float gain,
                        bool weigh_input) {
  const int64_t D = x.dimensions()[1], F = gates->dimensions()[1], at = *layer.typed_data();
  const auto bias = [](const Floats& of) {
    return of.element_count() ? of.typed_data() : nullptr;
  };
  const Tokens tokens = {experts.dimensions()[0], experts.dimensions()[1], x.typed_data(),
                         weights.typed_data(),    experts.typed_data(),    weigh_input,
                         gates->typed_data(),     ups->typed_data(),       outputs->typed_data(),
                         y->typed_data()};
  return by_precision(precision, [&](auto op) {
    using Op = decltype(op);
    const Layer<Op> experts_of = {Stack<Op>(gate, gate_scales, gate_zeros, at, D, F),
                                  Stack<Op>(up, up_scales, up_zeros, at, D, F),
                                  Stack<Op>(down, down_scales, down_zeros, at, F, D),
                                  bias(gate_bias),
                                  bias(up_bias),
                                  bias(down_bias),
                                  {gelu, clip, gain}};
    run_experts(pool, experts_of, tokens);
  });
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_packed_grouped_matmul, fornax::multiply_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<std::string_view>("precision")
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_packed_experts, fornax::experts_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<std::string_view>("precision")
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("gelu")
                                  .Attr<float>("clip")
                                  .Attr<float>("gain")
                                  .Attr<bool>("weigh_input"));
