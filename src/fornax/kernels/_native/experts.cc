// Experts of tokens in one call: the router's choice, the order of rows, and their products.
//
// Letters: M tokens, D width, E experts, k experts of a token, A = M k assignments, F width of an
// expert, G groups of experts; x, y [M, D], gate and up [L, E, D, F], down [L, E, F, D].

#include <cmath>
#include <limits>

#include "activation.h"
#include "grouped_product.h"

namespace fornax {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error order_call(Ints groups, ffi::ResultBuffer<ffi::S32> order,
                      ffi::ResultBuffer<ffi::S32> inverse, ffi::ResultBuffer<ffi::S32> sizes) {
  order_rows(groups.typed_data(), groups.dimensions()[0], sizes->dimensions()[0],
             order->typed_data(), inverse->typed_data(), sizes->typed_data());
  return ffi::Error::Success();
}

// Whether one score comes before another, as XLA orders them: NaN before all numbers.
inline bool is_better(float a, float b) {
  return a > b || (std::isnan(a) && !std::isnan(b));
}

// The `count` best of `values`, the best first, of equal ones the first.
void choose_best(const float* values, int64_t size, int64_t count, int32_t* found) {
  int64_t held = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (held == count && !is_better(values[i], values[found[held - 1]])) continue;
    int64_t at = held < count ? held++ : held - 1;
    for (; at > 0 && is_better(values[i], values[found[at - 1]]); --at) found[at] = found[at - 1];
    found[at] = static_cast<int32_t>(i);
  }
}

struct Router {
  int64_t experts, chosen, groups, open;
  bool sigmoid, two_best, normalise;
  float eps, scale;
  const float* bias;  // [E], or null

  int64_t width() const { return round_up(experts, kLanes); }
  int64_t floats() const { return 2 * width() + 3 * groups; }

  // The weights and the experts of a token with these logits.
  void route(const float* logits, Arena& arena, float* weights, int32_t* found) const {
    arena.start(floats());
    float* scores = arena.take(width());
    float* ranked = arena.take(width());
    if (sigmoid) {
      score_each(logits, scores);
    } else {
      score_all(logits, scores);
    }
    const bool all_open = open == groups;
    for (int64_t e = 0; e < experts; ++e) {
      // Logits are in the scores' order, and without ties where those round to one.
      ranked[e] = bias ? scores[e] + bias[e] : all_open ? logits[e] : scores[e];
    }
    if (!all_open) close_groups(ranked, arena);
    choose_best(ranked, experts, chosen, found);
    double total = 0;
    for (int64_t j = 0; j < chosen; ++j) total += weights[j] = scores[found[j]];
    const float divisor = normalise ? static_cast<float>(total) + eps : 1;
    for (int64_t j = 0; j < chosen; ++j) weights[j] = weights[j] / divisor * scale;
  }

 private:
  void score_each(const float* logits, float* scores) const {
    std::fill(scores + experts, scores + width(), 0.0f);
    std::copy_n(logits, experts, scores);
    for (int64_t e = 0; e < width(); e += kLanes) store(scores + e, logistic(load(scores + e)));
  }

  void score_all(const float* logits, float* scores) const {
    constexpr float kLeast = -std::numeric_limits<float>::infinity();
    float top = kLeast;
    bool finite = true;
    for (int64_t e = 0; e < experts; ++e) {
      top = std::max(top, logits[e]);
      finite &= !std::isnan(logits[e]);
    }
    if (!finite || std::isinf(top)) {
      std::fill_n(scores, experts, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    for (int64_t e = 0; e < experts; ++e) scores[e] = logits[e] - top;
    std::fill(scores + experts, scores + width(), kLeast);
    Vec total = {};
    for (int64_t e = 0; e < width(); e += kLanes) {
      const Vec x = load(scores + e), share = where(x < -87.0f, Vec{}, exponential(x));
      store(scores + e, share);
      total += share;
    }
    const float factor = 1 / sum(total);
    for (int64_t e = 0; e < experts; ++e) scores[e] *= factor;
  }

  // Sets experts to minus infinity that are in no open group.
  void close_groups(float* ranked, Arena& arena) const {
    const int64_t size = experts / groups;
    float* of_group = arena.take(groups);
    auto* order = reinterpret_cast<int32_t*>(arena.take(groups));
    for (int64_t g = 0; g < groups; ++g) {
      int32_t best[2];
      choose_best(ranked + g * size, size, two_best ? 2 : 1, best);
      of_group[g] = ranked[g * size + best[0]] + (two_best ? ranked[g * size + best[1]] : 0);
    }
    choose_best(of_group, groups, groups, order);
    for (int64_t g = open; g < groups; ++g) {
      std::fill_n(ranked + order[g] * size, size, -std::numeric_limits<float>::infinity());
    }
  }
};

ffi::Error route_call(ffi::ThreadPool pool, Floats logits, Floats bias,
                      ffi::ResultBuffer<ffi::F32> weights, ffi::ResultBuffer<ffi::S32> experts,
                      int64_t groups, int64_t open, bool sigmoid, bool two_best, bool normalise,
                      float eps, float scale) {
  const int64_t M = logits.dimensions()[0], E = logits.dimensions()[1];
  const int64_t k = experts->dimensions()[1];
  const Router router = {E,         k,   groups, open, sigmoid, two_best,
                         normalise, eps, scale,  bias.element_count() ? bias.typed_data() : nullptr};
  share_evenly(pool, M, M * E, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
      router.route(logits.typed_data() + m * E, Arena::of_this_thread(),
                   weights->typed_data() + m * k, experts->typed_data() + m * k);
    }
  });
  return ffi::Error::Success();
}

// Experts of one layer; biases are null where there are none.
template <typename T>
struct Layer {
  int64_t experts, width, inner;  // E, D, F
  const T *gate, *up, *down;      // [E, D, F] twice, [E, F, D]
  const float *gate_bias, *up_bias, *down_bias;
  Activation activation;
};

// What a call is given of its tokens, and room for their rows in the order of experts.
template <typename T>
struct Tokens {
  int64_t count, chosen;
  const float *x, *weights;
  const int32_t* experts;
  bool weigh_input;
  T *rows, *hidden;           // [A, D], [A, F]
  float *gates, *ups;         // [A, F] each
  float *outputs, *y;         // [A, D], [M, D]
};

// hidden = activation(gate, up) for some rows and columns of one expert, whose products are there.
template <typename T>
void activate(const Layer<T>& layer, const Tokens<T>& tokens, const Task& t, int64_t row) {
  const int64_t F = layer.inner, columns = t.right - t.left;
  for (int64_t i = row + t.top; i < row + t.bottom; ++i) {
    float *gate = tokens.gates + i * F + t.left, *up = tokens.ups + i * F + t.left;
    if (layer.gate_bias) add_line(gate, layer.gate_bias + t.group * F + t.left, columns);
    if (layer.up_bias) add_line(up, layer.up_bias + t.group * F + t.left, columns);
    layer.activation.run(gate, up, columns);
    put_line(gate, columns, tokens.hidden + i * F + t.left);
  }
}

template <typename T>
void run_experts(ffi::ThreadPool& pool, const Layer<T>& layer, const Tokens<T>& tokens) {
  const int64_t M = tokens.count, k = tokens.chosen, A = M * k;
  const int64_t E = layer.experts, D = layer.width, F = layer.inner;
  std::vector<int32_t> order(A), inverse(A), sizes(E);
  order_rows(tokens.experts, A, E, order.data(), inverse.data(), sizes.data());
  const std::vector<int64_t> edge = edges(sizes.data(), E, A);
  share_evenly(pool, M, edge[E] * D, [&](int64_t first, int64_t last) {
    for (int64_t a = first * k; a < last * k; ++a) {
      if (inverse[a] >= edge[E]) continue;
      const float* from = tokens.x + a / k * D;
      T* to = tokens.rows + inverse[a] * D;
      if (!tokens.weigh_input) {
        put_line(from, D, to);
        continue;
      }
      Arena& arena = Arena::of_this_thread();
      arena.start(D);
      float* line = arena.take(D);
      for (int64_t j = 0; j < D; ++j) line[j] = from[j] * tokens.weights[a];
      put_line(line, D, to);
    }
  });
  Tasks into, out;
  for (int64_t e = 0; e < E; ++e) {
    into.add(e, edge[e + 1] - edge[e], F);
    out.add(e, edge[e + 1] - edge[e], D);
  }
  const int64_t threads = pool.num_threads();
  // Gate and up of a task are two, one after the other; who ends last makes the activation of both.
  const std::vector<Task>&first = into.divided((threads + 1) / 2), &second = out.divided(threads);
  const int64_t count = 2 * static_cast<int64_t>(first.size());
  const int64_t others = static_cast<int64_t>(second.size());
  const std::unique_ptr<std::atomic<bool>[]> halves(new std::atomic<bool>[first.size()]());
  const auto matrix = [&](int64_t i) {
    const Task& t = first[i / 2];
    return (i % 2 ? layer.up : layer.gate) + t.group * D * F + t.left;
  };
  // Where the thread that has task i of both loops is likely to read after it.
  const auto next = [&](int64_t i) -> const T* {
    i += threads;
    if (i < count) return matrix(i);
    i -= count;
    return i < others ? layer.down + second[i].group * D * F + second[i].left : nullptr;
  };
  share_rows(pool, M, count, [&](int64_t i) {
    const Task& t = first[i / 2];
    const int64_t row = edge[t.group];
    const Product<T, float> product = {{tokens.rows + row * D, D, false},
                                       {matrix(i) - t.left, F, false},
                                       D,
                                       (i % 2 ? tokens.ups : tokens.gates) + row * F,
                                       F,
                                       next(i)};
    product.run(t.top, t.bottom, t.left, t.right);
    if (halves[i / 2].exchange(true)) activate(layer, tokens, t, row);
  });
  share_rows(pool, M, others, [&](int64_t i) {
    const Task& t = second[i];
    const int64_t row = edge[t.group];
    const Product<T, float> product = {{tokens.hidden + row * F, F, false},
                                       {layer.down + t.group * D * F, D, false},
                                       F,
                                       tokens.outputs + row * D,
                                       D,
                                       next(count + i)};
    product.run(t.top, t.bottom, t.left, t.right);
    for (int64_t r = row + t.top; layer.down_bias && r < row + t.bottom; ++r) {
      add_line(tokens.outputs + r * D + t.left, layer.down_bias + t.group * D + t.left,
               t.right - t.left);
    }
  });
  sum_outputs(pool, M, k, D, inverse.data(), edge[E], tokens.outputs,
              tokens.weigh_input ? nullptr : tokens.weights, tokens.y);
}

// The arguments of a call, whatever the dtype of its matrices.
struct Call {
  ffi::ThreadPool& pool;
  const Floats &x, &weights;
  const Ints& experts;
  const ffi::AnyBuffer &gate, &up, &down;
  int64_t layer;
  const Floats &gate_bias, &up_bias, &down_bias;
  ffi::ResultBuffer<ffi::F32>& y;
  ffi::Result<ffi::AnyBuffer>&rows, &hidden;
  ffi::ResultBuffer<ffi::F32>&gates, &ups, &outputs;
  Activation activation;
  bool weigh_input;
};

template <typename T>
void run(const Call& call) {
  const auto sizes = call.gate.dimensions();
  const int64_t E = sizes[1], D = sizes[2], F = sizes[3];
  const int64_t at = std::clamp<int64_t>(call.layer, 0, sizes[0] - 1) * E * D * F;
  const auto matrices = [&](const ffi::AnyBuffer& of) {
    return static_cast<const T*>(of.untyped_data()) + at;
  };
  const auto bias = [](const Floats& of) {
    return of.element_count() ? of.typed_data() : nullptr;
  };
  const Layer<T> layer = {E,
                          D,
                          F,
                          matrices(call.gate),
                          matrices(call.up),
                          matrices(call.down),
                          bias(call.gate_bias),
                          bias(call.up_bias),
                          bias(call.down_bias),
                          call.activation};
  const auto tokens = call.experts.dimensions();
  run_experts<T>(call.pool, layer,
                 {tokens[0], tokens[1], call.x.typed_data(), call.weights.typed_data(),
                  call.experts.typed_data(), call.weigh_input,
                  static_cast<T*>(call.rows->untyped_data()),
                  static_cast<T*>(call.hidden->untyped_data()), call.gates->typed_data(),
                  call.ups->typed_data(), call.outputs->typed_data(), call.y->typed_data()});
}

ffi::Error experts_call(ffi::ThreadPool pool, Floats x, Floats weights, Ints experts,
                        ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down,
                        ffi::BufferR0<ffi::S32> layer, Floats gate_bias, Floats up_bias,
                        Floats down_bias, ffi::ResultBuffer<ffi::F32> y,
                        ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::AnyBuffer> hidden,
                        ffi::ResultBuffer<ffi::F32> gates, ffi::ResultBuffer<ffi::F32> ups,
                        ffi::ResultBuffer<ffi::F32> outputs, bool gelu, float clip, float gain,
                        bool weigh_input) {
  const Call call = {pool,    x,         weights,              experts,   gate,      up,
                     down,    *layer.typed_data(), gate_bias,  up_bias,   down_bias, y,
                     rows,    hidden,    gates,                ups,       outputs,
                     {gelu, clip, gain}, weigh_input};
  (gate.element_type() == ffi::F32 ? run<float> : run<Half>)(call);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_group_order, fornax::order_call,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_route, fornax::route_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("open")
                                  .Attr<bool>("sigmoid")
                                  .Attr<bool>("two_best")
                                  .Attr<bool>("normalise")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_fused_experts, fornax::experts_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("gelu")
                                  .Attr<float>("clip")
                                  .Attr<float>("gain")
                                  .Attr<bool>("weigh_input"));
