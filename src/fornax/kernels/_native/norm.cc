// y = x / sqrt(mean(x^2) + eps) * scale, each row summed in one order whatever the number of rows.
//
// Letters: M rows, D width. x, y [M, D], scale [D].

#include <algorithm>
#include <cmath>

#include "crew.h"

namespace fornax {
namespace {

constexpr int64_t kAlone = 1 << 16;  // elements that are not worth a second thread

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

template <typename T>
void run(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const float* scale, float eps,
         ffi::AnyBuffer& y) {
  const int64_t M = x.dimensions()[0], D = x.dimensions()[1];
  const auto* from = static_cast<const T*>(x.untyped_data());
  auto* to = static_cast<T*>(y.untyped_data());
  const int64_t most = M * D <= kAlone ? 1 : 4 * pool.num_threads();
  const int64_t parts = std::clamp<int64_t>(most, 1, M);
  share_rows(pool, M, parts, [&](int64_t part) {
    Arena& arena = Arena::of_this_thread();
    arena.start(round_up(D, kLanes));
    float* line = arena.take(round_up(D, kLanes));
    for (int64_t i = M * part / parts; i < M * (part + 1) / parts; ++i) {
      normalise(from + i * D, scale, D, eps, line, to + i * D);
    }
  });
}

ffi::Error rms_norm_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> scale,
                         ffi::Result<ffi::AnyBuffer> y, float eps) {
  const auto of = x.element_type() == ffi::F32 ? run<float> : run<Half>;
  of(pool, x, scale.typed_data(), eps, *y);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_rms_norm, fornax::rms_norm_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
