// y = x / sqrt(mean(x^2) + eps) * (scale + offset) / divisor, each row summed in one order whatever
// the number of rows.
//
// Letters: L layers, M rows, D width. x, y [M, D], scale [L, D], of which one is read.

#include <algorithm>
#include <cmath>

#include "crew.h"

namespace fornax {
namespace {

template <typename T>
void normalise(const T* x, const float* scale, int64_t D, float eps, float* line, T* y) {
  const int64_t width = round_up(D, kLanes);
  for (int64_t j = 0; j < D; ++j) line[j] = widen(x[j]);
  std::fill(line + D, line + width, 0.0f);
  Vec squares[4] = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec v = load(line + j);
    squares[j / kLanes % 4] += v * v;
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float factor = 1 / std::sqrt(total / static_cast<float>(D) + eps);
  for (int64_t j = 0; j < D; ++j) narrow(line[j] * factor * scale[j], y + j);
}

struct Scale {
  const ffi::AnyBuffer& layers;
  int64_t layer;
  float offset, divisor;

  template <typename T>
  void write(float* to) const {
    const int64_t L = layers.dimensions()[0], D = layers.dimensions()[1];
    const T* from = static_cast<const T*>(layers.untyped_data()) +
                    std::clamp<int64_t>(layer, 0, L - 1) * D;
    for (int64_t j = 0; j < D; ++j) to[j] = (widen(from[j]) + offset) / divisor;
  }
};

template <typename T>
void run(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Scale& of, float eps,
         ffi::AnyBuffer& y) {
  const int64_t M = x.dimensions()[0], D = x.dimensions()[1];
  const auto* from = static_cast<const T*>(x.untyped_data());
  auto* to = static_cast<T*>(y.untyped_data());
  static thread_local Arena scales;
  scales.start(D);
  float* scale = scales.take(D);
  if (of.layers.element_type() == ffi::F32) {
    of.write<float>(scale);
  } else {
    of.write<Half>(scale);
  }
  share_evenly(pool, M, M * D, [&, scale](int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(round_up(D, kLanes));
    float* line = arena.take(round_up(D, kLanes));
    for (int64_t i = first; i < last; ++i) {
      normalise(from + i * D, scale, D, eps, line, to + i * D);
    }
  });
}

ffi::Error rms_norm_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                         ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y, float eps,
                         float offset, float divisor) {
  const Scale of = {scale, *layer.typed_data(), offset, divisor};
  (x.element_type() == ffi::F32 ? run<float> : run<Half>)(pool, x, of, eps, *y);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_rms_norm, fornax::rms_norm_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<float>("divisor"));
