// What lies between a decoder's products: the gated linear unit, rotary embeddings, rows of the table of
// embeddings, and the likeliest token of each row of logits. XLA's loops for these run on one thread, or wake another
// one for longer than the work takes.
//
// Letters: M rows, N heads, H their width, r pairs of its elements, F width of an MLP, V rows of the table or tokens of the vocabulary, D width.

#include <algorithm>
#include <cmath>
#include <limits>

#include "activation.h"
#include "crew.h"

namespace fornax {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

constexpr int64_t kPiece = 1024;    // elements that are widened, activated and narrowed at once
constexpr int64_t kFew = 16 * kPiece;  // elements with an exponential each for one thread

// y = activation(gate) * up over elements [first, last).
template <typename T>
void gated(const T* gate, const T* up, const Activation& activation, int64_t first, int64_t last,
           T* y) {
  float left[kPiece], right[kPiece];
  for (; first < last; first += kPiece) {
    const int64_t count = std::min(kPiece, last - first);
    for (int64_t j = 0; j < count; ++j) left[j] = widen(gate[first + j]);
    for (int64_t j = 0; j < count; ++j) right[j] = widen(up[first + j]);
    activation.run(left, right, count);
    for (int64_t j = 0; j < count; ++j) narrow(left[j], y + first + j);
  }
}

// Calls work(first, last) for all elements of M rows, on several threads where they are worth it.
template <typename Work>
void in_pieces(ffi::ThreadPool& pool, int64_t M, int64_t elements, const Work& work) {
  const int64_t pieces = (elements + kPiece - 1) / kPiece;
  const int64_t parts =
      elements <= kFew ? 1 : std::min<int64_t>(pieces, 4 * std::max<int64_t>(pool.num_threads(), 1));
  share_rows(pool, M, parts, [&](int64_t part) {
    work(pieces * part / parts * kPiece,
         std::min(elements, pieces * (part + 1) / parts * kPiece));
  });
}

template <typename T>
void gated_linear_unit(ffi::ThreadPool& pool, const ffi::AnyBuffer& gate, const ffi::AnyBuffer& up,
                       const Activation& activation, ffi::AnyBuffer& y) {
  const int64_t M = gate.dimensions()[0], elements = M * gate.dimensions()[1];
  in_pieces(pool, M, elements, [&](int64_t first, int64_t last) {
    gated(static_cast<const T*>(gate.untyped_data()), static_cast<const T*>(up.untyped_data()),
          activation, first, last, static_cast<T*>(y.untyped_data()));
  });
}

// The gradients of gate and up over elements [first, last).
template <typename T>
void gated_gradient(const T* dy, const T* gate, const T* up, const Activation& activation,
                    int64_t first, int64_t last, T* dgate, T* dup) {
  float given[kPiece], left[kPiece], right[kPiece];
  for (; first < last; first += kPiece) {
    const int64_t count = std::min(kPiece, last - first);
    for (int64_t j = 0; j < count; ++j) given[j] = widen(dy[first + j]);
    for (int64_t j = 0; j < count; ++j) left[j] = widen(gate[first + j]);
    for (int64_t j = 0; j < count; ++j) right[j] = widen(up[first + j]);
    activation.gradient(given, left, right, count);
    for (int64_t j = 0; j < count; ++j) narrow(left[j], dgate + first + j);
    for (int64_t j = 0; j < count; ++j) narrow(right[j], dup + first + j);
  }
}

template <typename T>
void gated_linear_unit_gradient(ffi::ThreadPool& pool, const ffi::AnyBuffer& dy,
                                const ffi::AnyBuffer& gate, const ffi::AnyBuffer& up,
                                const Activation& activation, ffi::AnyBuffer& dgate,
                                ffi::AnyBuffer& dup) {
  const int64_t M = gate.dimensions()[0], elements = M * gate.dimensions()[1];
  in_pieces(pool, M, elements, [&](int64_t first, int64_t last) {
    gated_gradient(static_cast<const T*>(dy.untyped_data()),
                   static_cast<const T*>(gate.untyped_data()),
                   static_cast<const T*>(up.untyped_data()), activation, first, last,
                   static_cast<T*>(dgate.untyped_data()), static_cast<T*>(dup.untyped_data()));
  });
}

ffi::Error gated_linear_unit_gradient_call(ffi::ThreadPool pool, ffi::AnyBuffer dy,
                                           ffi::AnyBuffer gate, ffi::AnyBuffer up,
                                           ffi::Result<ffi::AnyBuffer> dgate,
                                           ffi::Result<ffi::AnyBuffer> dup, bool gelu) {
  const auto run = gate.element_type() == ffi::F32 ? gated_linear_unit_gradient<float>
                                                   : gated_linear_unit_gradient<Half>;
  run(pool, dy, gate, up, {gelu, 0.0f, 0.0f}, *dgate, *dup);
  return ffi::Error::Success();
}

ffi::Error gated_linear_unit_call(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                                  ffi::Result<ffi::AnyBuffer> y, bool gelu) {
  const auto run = gate.element_type() == ffi::F32 ? gated_linear_unit<float> : gated_linear_unit<Half>;
  run(pool, gate, up, {gelu, 0.0f, 0.0f}, *y);
  return ffi::Error::Success();
}

// Rows of the table; NaN where there is none. A negative index counts from the end.
template <typename From, typename To>
void take_rows(ffi::ThreadPool& pool, const ffi::AnyBuffer& table, const Ints& index,
               ffi::AnyBuffer& y) {
  const int64_t V = table.dimensions()[0], D = table.dimensions()[1];
  const int64_t M = index.element_count();
  const auto* from = static_cast<const From*>(table.untyped_data());
  auto* to = static_cast<To*>(y.untyped_data());
  share_evenly(pool, M, M * D, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t given = index.typed_data()[i], row = given < 0 ? given + V : given;
      for (int64_t j = 0; j < D; ++j) {
        const float x = row < 0 || row >= V ? std::numeric_limits<float>::quiet_NaN()
                                            : widen(from[row * D + j]);
        narrow(x, to + i * D + j);
      }
    }
  });
}

ffi::Error take_rows_call(ffi::ThreadPool pool, ffi::AnyBuffer table, Ints index,
                          ffi::Result<ffi::AnyBuffer> y) {
  const bool wide = table.element_type() == ffi::F32, wide_y = y->element_type() == ffi::F32;
  const auto run = wide ? (wide_y ? take_rows<float, float> : take_rows<float, Half>)
                        : (wide_y ? take_rows<Half, float> : take_rows<Half, Half>);
  run(pool, table, index, *y);
  return ffi::Error::Success();
}

// Pairs of each head's first 2 r elements turned; neighbours come out r apart.
template <typename T>
void rotary_embedding(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Floats& cos,
                      const Floats& sin, bool interleaved, ffi::AnyBuffer& y) {
  const int64_t tokens = x.dimensions()[0] * x.dimensions()[1], N = x.dimensions()[2];
  const int64_t H = x.dimensions()[3], r = cos.dimensions()[2];
  share_evenly(pool, tokens, tokens * N * H, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *c = cos.typed_data() + t * r, *s = sin.typed_data() + t * r;
      for (int64_t n = 0; n < N; ++n) {
        const T* from = static_cast<const T*>(x.untyped_data()) + (t * N + n) * H;
        T* to = static_cast<T*>(y.untyped_data()) + (t * N + n) * H;
        const int64_t step = interleaved ? 2 : 1;
        const T* other = from + (interleaved ? 1 : r);
        for (int64_t i = 0; i < r; ++i) {
          const float first = widen(from[i * step]), second = widen(other[i * step]);
          narrow(first * c[i] - second * s[i], to + i);
          narrow(second * c[i] + first * s[i], to + r + i);
        }
        std::copy(from + 2 * r, from + H, to + 2 * r);
      }
    }
  });
}

ffi::Error rotary_embedding_call(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats cos, Floats sin,
                                 ffi::Result<ffi::AnyBuffer> y, bool interleaved) {
  const auto run = x.element_type() == ffi::F32 ? rotary_embedding<float> : rotary_embedding<Half>;
  run(pool, x, cos, sin, interleaved, *y);
  return ffi::Error::Success();
}

// The first of the greatest elements; -1 where one is NaN, or the greatest is not finite.
int32_t argmax(const float* x, int64_t V) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  float best = kLeast;
  int64_t at = 0, end = 0;  // the block of the first greatest element
  for (int64_t start = 0; start < V; start += kPiece) {
    const int64_t stop = std::min(V, start + kPiece);
    Vec top[4] = {splat(kLeast), splat(kLeast), splat(kLeast), splat(kLeast)};
    IntVec unordered = {};
    int64_t j = start;
    for (; j + 4 * kLanes <= stop; j += 4 * kLanes) {
      for (int i = 0; i < 4; ++i) {
        const Vec v = load(x + j + i * kLanes);
        unordered |= v != v;
        top[i] = maximum(v, top[i]);
      }
    }
    float most = highest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
    bool nan = false;
    for (int i = 0; i < kLanes; ++i) nan |= unordered[i] != 0;
    for (; j < stop; ++j) {
      nan |= x[j] != x[j];
      most = x[j] > most ? x[j] : most;
    }
    if (nan) return -1;
    if (most > best) best = most, at = start, end = stop;
  }
  if (!std::isfinite(best)) return -1;
  return static_cast<int32_t>(std::find(x + at, x + end, best) - x);
}

ffi::Error argmax_call(ffi::ThreadPool pool, Floats x, ffi::ResultBuffer<ffi::S32> y) {
  const int64_t M = x.dimensions()[0], V = x.dimensions()[1];
  share_evenly(pool, M, M * V, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) y->typed_data()[i] = argmax(x.typed_data() + i * V, V);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_gated_linear_unit, fornax::gated_linear_unit_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_gated_linear_unit_gradient,
                              fornax::gated_linear_unit_gradient_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("gelu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_take_rows, fornax::take_rows_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_argmax, fornax::argmax_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_rotary_embedding, fornax::rotary_embedding_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("interleaved"));
