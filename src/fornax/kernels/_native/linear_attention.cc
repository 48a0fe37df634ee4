// Linear attention over a ragged batch whose states lie in slots: the causal convolution of each channel over
// time, with its activation, and the gated delta rule. With g the logarithm of the decay, a token
// does S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q, or S <- exp(g) S + k v^T without the correction.
//
// Columns of a state depend on no other, so each task takes some columns of one head's state through all tokens of
// one sequence, one after the other: between two tokens they lie in the first cache. On CPU that has as many
// operations as chunks have, and a sequence's bits depend on nothing else, not even on how it was cut into steps.
//
// Letters: T tokens, U sequences, L layers, A slots, J slots that a sequence writes, K key heads, R value heads of a
// key head, H key width, V value width, C channels, W width of a convolution.

#include <algorithm>
#include <cmath>

#include "activation.h"
#include "slots.h"

namespace fornax {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

constexpr int kWide = kLanes >= 16 ? 4 : 2;  // vectors of columns of a task
constexpr int64_t kAhead = 2;                // tokens whose numbers are on their way
constexpr int64_t kCached = 1 << 13;         // numbers of a task's columns that the first cache holds

// Some columns of a state: its rows lie `row` numbers apart, 0 for a state of zeros.
struct Columns {
  float* at;
  int64_t row;
};

// A token's numbers for one head; `decayed` is the key times the decay.
struct Token {
  float decay, beta;
  const float *q, *k, *decayed, *v;
};

// What the keys find in the state after its decay. Sums have several parts, so that none waits for the one before.
template <int kVecs>
inline void find(const Token& token, Columns from, int64_t H, Vec (&found)[kVecs]) {
  constexpr int kParts = 8 / kVecs;
  Vec acc[kParts][kVecs];
  clear(acc);
  int64_t h = 0;
  for (; h + kParts <= H; h += kParts) {
    for (int part = 0; part < kParts; ++part) {
      const Vec key = splat(token.decayed[h + part]);
      for (int j = 0; j < kVecs; ++j) {
        acc[part][j] += key * load(from.at + (h + part) * from.row + j * kLanes);
      }
    }
  }
  for (; h < H; ++h) {
    const Vec key = splat(token.decayed[h]);
    for (int j = 0; j < kVecs; ++j) acc[0][j] += key * load(from.at + h * from.row + j * kLanes);
  }
  for (int j = 0; j < kVecs; ++j) {
    found[j] = acc[0][j];
    for (int part = 1; part < kParts; ++part) found[j] += acc[part][j];
  }
}

// One token: the state that is read from `from` is written to `to`, and what the query reads there to o.
template <int kVecs, bool kCorrects>
void step(const Token& token, Columns from, Columns to, int64_t H, float* o) {
  constexpr int kParts = 4 / kVecs;
  Vec moved[kVecs];
  for (int j = 0; j < kVecs; ++j) moved[j] = load(token.v + j * kLanes);
  if constexpr (kCorrects) {
    Vec found[kVecs];
    find(token, from, H, found);
    for (int j = 0; j < kVecs; ++j) moved[j] = splat(token.beta) * (moved[j] - found[j]);
  }
  const Vec decay = splat(token.decay);
  Vec acc[kParts][kVecs];
  clear(acc);
  const auto row = [&](int64_t h, Vec (&sums)[kVecs]) {
    const Vec key = splat(token.k[h]), query = splat(token.q[h]);
    for (int j = 0; j < kVecs; ++j) {
      const Vec state = decay * load(from.at + h * from.row + j * kLanes) + key * moved[j];
      store(to.at + h * to.row + j * kLanes, state);
      sums[j] += query * state;
    }
  };
  int64_t h = 0;
  for (; h + kParts <= H; h += kParts) {
    for (int part = 0; part < kParts; ++part) row(h + part, acc[part]);
  }
  for (; h < H; ++h) row(h, acc[0]);
  for (int j = 0; j < kVecs; ++j) {
    Vec read = acc[0][j];
    for (int part = 1; part < kParts; ++part) read += acc[part][j];
    store(o + j * kLanes, read);
  }
}

// Tokens of a head lie pages apart, where the processor fetches nothing by itself.
inline void fetch(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

// The rule's arrays and sizes.
struct Batch : Rows {
  const float *q, *k, *v, *log_decay, *beta;  // beta is null without the correction
  float *states, *o;                          // of the layer, and of the batch
  int64_t K, R, H, V;

  int64_t size() const { return K * R * H * V; }
};

// All tokens of sequence u in columns [left, left + width) of head `head`, width at most kVecs vectors. `before` is
// the sequence's state before the step, null for zeros.
template <int kVecs, bool kCorrects>
void walk(const Batch& b, int64_t u, const float* before, int64_t head, int64_t left, int64_t width) {
  constexpr int64_t kColumns = kVecs * kLanes;
  const int64_t heads = b.K * b.R, at = head * b.H * b.V + left, count = b.count(u);
  Arena& arena = Arena::of_this_thread();
  arena.start(b.H * kColumns + round_up(b.H, kLanes) + 3 * kColumns);
  const Columns own = {arena.take(b.H * kColumns), kColumns};
  float* decayed = arena.take(round_up(b.H, kLanes));
  float* v = arena.take(kColumns);
  float* o = arena.take(kColumns);
  float* nothing = arena.take(kColumns);
  std::fill(v, v + kColumns, 0.0f);
  std::fill(nothing, nothing + kColumns, 0.0f);
  const bool whole = width == kColumns;  // else columns are copied, with zeros after them
  Columns from = {nothing, 0};
  if (before && whole) from = {const_cast<float*>(before) + at, b.V};
  if (before && !whole) {
    std::fill(own.at, own.at + b.H * kColumns, 0.0f);
    for (int64_t h = 0; h < b.H; ++h) {
      std::copy_n(before + at + h * b.V, width, own.at + h * kColumns);
    }
    from = own;
  }
  for (int64_t j = 0; j < count; ++j) {
    const int64_t t = b.begin(u) + j, key = (t * b.K + head / b.R) * b.H, value = t * heads + head;
    if (j + kAhead < count) {
      const int64_t next = t + kAhead;
      fetch(b.q + key + kAhead * b.K * b.H, b.H);
      fetch(b.k + key + kAhead * b.K * b.H, b.H);
      fetch(b.v + (next * heads + head) * b.V + left, width);
      fetch(b.o + (next * heads + head) * b.V + left, width);
    }
    Token token = {std::exp(b.log_decay[value]), 0.0f, b.q + key, b.k + key, decayed, v};
    if constexpr (kCorrects) {
      token.beta = b.beta[value];
      for (int64_t h = 0; h < b.H; ++h) decayed[h] = token.decay * token.k[h];
    }
    std::copy_n(b.v + value * b.V + left, width, v);
    const int64_t slot = b.kept_after(u, j);
    float* kept = slot < 0 ? nullptr : b.states + slot * b.size() + at;
    const Columns to = kept && whole ? Columns{kept, b.V} : own;
    step<kVecs, kCorrects>(token, from, to, b.H, o);
    if (kept && !whole) {
      for (int64_t h = 0; h < b.H; ++h) std::copy_n(own.at + h * kColumns, width, kept + h * b.V);
    }
    std::copy_n(o, width, b.o + value * b.V + left);
    from = to;
  }
}

// A sequence goes on from the state before the step, even where another one writes its slot: [U], of which those are
// copied. Null: of a sequence that begins, or has no token.
std::vector<const float*> states_before(const Batch& b, std::vector<float>& copies) {
  static thread_local std::vector<int64_t> writer;
  writer.assign(b.A, -1);
  for (int64_t u = 0; u < b.U; ++u) {
    for (int64_t j = 0; j < b.count(u); ++j) {
      if (b.count(u) > b.J) j = b.count(u) - 1;
      if (const int64_t slot = b.kept_after(u, j); slot >= 0) writer[slot] = u;
    }
  }
  std::vector<const float*> before(b.U, nullptr);
  std::vector<int64_t> shared;
  for (int64_t u = 0; u < b.U; ++u) {
    const int64_t slot = b.before(u);
    if (slot < 0) continue;
    before[u] = b.states + slot * b.size();
    if (writer[slot] >= 0 && writer[slot] != u) shared.push_back(u);
  }
  copies.resize(shared.size() * b.size());
  for (size_t i = 0; i < shared.size(); ++i) {
    float* copy = copies.data() + i * b.size();
    std::copy_n(before[shared[i]], b.size(), copy);
    before[shared[i]] = copy;
  }
  return before;
}

// Vectors of columns of a task: as many as the first cache holds, and no more than there are.
int64_t vectors_of(const Batch& b) {
  int64_t vecs = kWide;
  while (vecs > 1 && (vecs * kLanes * b.H > kCached || vecs * kLanes > b.V)) vecs /= 2;
  return vecs;
}

template <bool kCorrects>
void run(ffi::ThreadPool& pool, const Batch& b) {
  std::vector<float> copies;
  const std::vector<const float*> before = states_before(b, copies);
  const int64_t wide = vectors_of(b) * kLanes, blocks = (b.V + wide - 1) / wide;
  const int64_t heads = b.K * b.R;
  const auto task = [&](int64_t i) {
    const int64_t u = i / (heads * blocks), head = i / blocks % heads;
    int64_t left = i % blocks * wide, vecs = wide / kLanes;
    const int64_t end = std::min(b.V, left + wide);
    for (; left < end; left += vecs * kLanes) {
      while (vecs > 1 && vecs * kLanes > end - left) vecs /= 2;
      const int64_t width = std::min(end - left, vecs * kLanes);
      const auto work = vecs == 4   ? walk<4, kCorrects>
                        : vecs == 2 ? walk<2, kCorrects>
                                    : walk<1, kCorrects>;
      work(b, u, before[u], head, left, width);
    }
  };
  share_tasks(pool, b.tokens(), b.tokens() * b.size(), b.U * heads * blocks, task);
  std::fill(b.o + b.tokens() * heads * b.V, b.o + b.T * heads * b.V, 0.0f);
}

ffi::Error ragged_delta_rule_call(ffi::ThreadPool pool, Floats states, Floats q, Floats k, Floats v,
                                  Floats log_decay, Floats beta, ffi::BufferR0<ffi::S32> layer,
                                  Ints starts, Ints slots, Ints kept, Flags fresh,
                                  ffi::Result<Floats> written, ffi::Result<Floats> o) {
  const auto sizes = states.dimensions();
  const int64_t L = sizes[0], A = sizes[1], K = sizes[2], R = sizes[3], H = sizes[4], V = sizes[5];
  float* at = written->typed_data();
  if (at != states.typed_data()) std::copy_n(states.typed_data(), states.element_count(), at);
  at += std::clamp<int64_t>(*layer.typed_data(), 0, L - 1) * A * K * R * H * V;
  const float* corrections = beta.element_count() ? beta.typed_data() : nullptr;
  const Batch batch = {rows_of(v.dimensions()[0], A, starts, slots, kept, fresh),
                       q.typed_data(),
                       k.typed_data(),
                       v.typed_data(),
                       log_decay.typed_data(),
                       corrections,
                       at,
                       o->typed_data(),
                       K,
                       R,
                       H,
                       V};
  batch.beta ? run<true>(pool, batch) : run<false>(pool, batch);
  return ffi::Error::Success();
}

constexpr int64_t kChannels = 256;  // of a task

// The convolution's arrays and sizes; Number is float or Half.
template <typename Number>
struct Convolution : Rows {
  const Number* x;
  const float *weights, *bias;  // [C, W], the oldest token's first; bias is null for none
  Number *inputs, *y;           // the layer's slots [A, W - 1, C], and what comes out
  int64_t C, W;
  Activation activation;

  Number* input(int64_t slot, int64_t back) const { return inputs + (slot * (W - 1) + back) * C; }
};

// All tokens in channels [left, left + width), where no other task reads or writes.
template <typename Number>
void convolve(const Convolution<Number>& c, int64_t left, int64_t width) {
  const int64_t kept = c.W - 1, room = round_up(width, kLanes);
  Arena& arena = Arena::of_this_thread();
  arena.start((c.U * kept + 2 * c.W + 2) * room);
  float* before = arena.take(c.U * kept * room);  // of all sequences, ahead of any write
  float* weights = arena.take(c.W * room);
  float* seen = arena.take(c.W * room);  // a ring of the last tokens
  float* sums = arena.take(room);
  float* ones = arena.take(room);
  std::fill(ones, ones + room, 1.0f);
  for (int64_t w = 0; w < c.W; ++w) {
    for (int64_t i = 0; i < width; ++i) weights[w * room + i] = c.weights[(left + i) * c.W + w];
  }
  for (int64_t u = 0; u < c.U; ++u) {
    const int64_t slot = c.before(u);
    for (int64_t w = 0; w < kept; ++w) {
      float* to = before + (u * kept + w) * room;
      if (slot < 0) std::fill(to, to + width, 0.0f);
      for (int64_t i = 0; slot >= 0 && i < width; ++i) to[i] = widen(c.input(slot, w)[left + i]);
    }
  }
  for (int64_t u = 0; u < c.U; ++u) {
    std::copy_n(before + u * kept * room, kept * room, seen);
    for (int64_t j = 0; j < c.count(u); ++j) {
      const int64_t t = c.begin(u) + j;
      float* last = seen + (j + kept) % c.W * room;
      for (int64_t i = 0; i < width; ++i) last[i] = widen(c.x[t * c.C + left + i]);
      for (int64_t i = 0; i < width; ++i) sums[i] = 0;
      for (int64_t w = 0; w < c.W; ++w) {
        const float *scale = weights + w * room, *from = seen + (j + w) % c.W * room;
        for (int64_t i = 0; i < width; ++i) sums[i] += from[i] * scale[i];
      }
      for (int64_t i = 0; c.bias && i < width; ++i) sums[i] += c.bias[left + i];
      c.activation.run(sums, ones, width);
      for (int64_t i = 0; i < width; ++i) narrow(sums[i], c.y + t * c.C + left + i);
      const int64_t slot = c.kept_after(u, j);
      for (int64_t w = 0; slot >= 0 && w < kept; ++w) {
        const float* from = seen + (j + 1 + w) % c.W * room;
        for (int64_t i = 0; i < width; ++i) narrow(from[i], c.input(slot, w) + left + i);
      }
    }
  }
  for (int64_t t = c.tokens(); t < c.T; ++t) {
    for (int64_t i = 0; i < width; ++i) narrow(0.0f, c.y + t * c.C + left + i);
  }
}

template <typename Number>
void run_convolution(ffi::ThreadPool& pool, const Rows& rows, const ffi::AnyBuffer& x,
                     const Floats& weights, const Floats& bias, ffi::AnyBuffer& inputs,
                     int64_t layer, const Activation& activation, ffi::AnyBuffer& y) {
  const int64_t C = weights.dimensions()[0], W = weights.dimensions()[1];
  const Convolution<Number> c = {rows,
                            static_cast<const Number*>(x.untyped_data()),
                            weights.typed_data(),
                            bias.element_count() ? bias.typed_data() : nullptr,
                            static_cast<Number*>(inputs.untyped_data()) + layer * rows.A * (W - 1) * C,
                            static_cast<Number*>(y.untyped_data()),
                            C,
                            W,
                            activation};
  const int64_t blocks = (C + kChannels - 1) / kChannels;
  share_tasks(pool, rows.T, rows.T * C * W, blocks, [&](int64_t i) {
    convolve(c, i * kChannels, std::min(kChannels, C - i * kChannels));
  });
}

ffi::Error ragged_convolution_call(ffi::ThreadPool pool, ffi::AnyBuffer inputs, ffi::AnyBuffer x,
                                   Floats weights, Floats bias, ffi::BufferR0<ffi::S32> layer,
                                   Ints starts, Ints slots, Ints kept, Flags fresh,
                                   ffi::Result<ffi::AnyBuffer> written,
                                   ffi::Result<ffi::AnyBuffer> y, bool gelu) {
  if (written->untyped_data() != inputs.untyped_data()) {
    std::memcpy(written->untyped_data(), inputs.untyped_data(), inputs.size_bytes());
  }
  const int64_t L = inputs.dimensions()[0], A = inputs.dimensions()[1];
  const Rows rows = rows_of(x.dimensions()[0], A, starts, slots, kept, fresh);
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, L - 1);
  const auto run = x.element_type() == ffi::F32 ? run_convolution<float> : run_convolution<Half>;
  run(pool, rows, x, weights, bias, *written, at, {gelu, 0.0f, 0.0f}, *y);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_ragged_convolution, fornax::ragged_convolution_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_ragged_delta_rule, fornax::ragged_delta_rule_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
