// y = x / sqrt(mean(x^2) + eps) * (scale + offset) / divisor, each row summed in one order whatever
// the number of rows; and the same of x + branch, which is returned too.
//
// Letters: L layers, M rows, D width. x, branch, y [M, D], scale [L, D], of which one is read.

#include <algorithm>
#include <cmath>

#include "crew.h"

namespace fornax {
namespace {

// y of the row that stands in `line`.
template <typename T>
void normalise(float* line, const float* scale, int64_t D, float eps, T* y) {
  const int64_t width = round_up(D, kLanes);
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

// What is normalised, and where it goes; without a branch there is no sum.
template <typename T>
struct Rows {
  const T *x, *branch;
  T *total, *y;

  // Row i, widened.
  void read(int64_t i, int64_t D, float* line) const {
    if (!branch) {
      for (int64_t j = 0; j < D; ++j) line[j] = widen(x[i * D + j]);
      return;
    }
    for (int64_t j = 0; j < D; ++j) {
      T* to = total + i * D + j;
      narrow(widen(x[i * D + j]) + widen(branch[i * D + j]), to);
      line[j] = widen(*to);
    }
  }
};

template <typename T>
void run(ffi::ThreadPool& pool, int64_t M, int64_t D, const Rows<T>& rows, const Scale& of,
         float eps) {
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
      rows.read(i, D, line);
      normalise(line, scale, D, eps, rows.y + i * D);
    }
  });
}

template <typename T>
void run_call(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const void* branch, void* total,
              const Scale& of, float eps, ffi::AnyBuffer& y) {
  const Rows<T> rows = {static_cast<const T*>(x.untyped_data()), static_cast<const T*>(branch),
                        static_cast<T*>(total), static_cast<T*>(y.untyped_data())};
  run(pool, x.dimensions()[0], x.dimensions()[1], rows, of, eps);
}

ffi::Error rms_norm_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                         ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y, float eps,
                         float offset, float divisor) {
  const Scale of = {scale, *layer.typed_data(), offset, divisor};
  const auto call = x.element_type() == ffi::F32 ? run_call<float> : run_call<Half>;
  call(pool, x, nullptr, nullptr, of, eps, *y);
  return ffi::Error::Success();
}

ffi::Error add_rms_norm_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer branch,
                             ffi::AnyBuffer scale, ffi::BufferR0<ffi::S32> layer,
                             ffi::Result<ffi::AnyBuffer> total, ffi::Result<ffi::AnyBuffer> y,
                             float eps, float offset, float divisor) {
  const Scale of = {scale, *layer.typed_data(), offset, divisor};
  const auto call = x.element_type() == ffi::F32 ? run_call<float> : run_call<Half>;
  call(pool, x, branch.untyped_data(), total->untyped_data(), of, eps, *y);
  return ffi::Error::Success();
}

constexpr int64_t kBlock = 64;  // rows whose part of the scale's gradient is summed together

// dx of a row that stands in `line`, and what it adds to the gradient of the scale. With
// n = x / sqrt(mean(x^2) + eps) and s the scale: dx = (s dy - n mean(n s dy)) / sqrt(...),
// and n dy is added.
template <typename T>
void normalise_gradient(float* line, float* slope, const float* scale, int64_t D, float eps, T* dx,
                        float* dscale) {
  const int64_t width = round_up(D, kLanes);
  std::fill(line + D, line + width, 0.0f);
  std::fill(slope + D, slope + width, 0.0f);
  Vec squares[4] = {}, products[4] = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec v = load(line + j);
    squares[j / kLanes % 4] += v * v;
    products[j / kLanes % 4] += v * (load(slope + j) * load(scale + j));
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float along = sum((products[0] + products[1]) + (products[2] + products[3]));
  const float factor = 1 / std::sqrt(total / static_cast<float>(D) + eps);
  const float back = along * factor * factor / static_cast<float>(D);
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec v = load(line + j), d = load(slope + j);
    store(dscale + j, load(dscale + j) + d * v * splat(factor));
    store(line + j, splat(factor) * (d * load(scale + j) - splat(back) * v));
  }
  for (int64_t j = 0; j < D; ++j) narrow(line[j], dx + j);
}

template <typename T>
void run_gradient(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy,
                  const Scale& of, float eps, ffi::AnyBuffer& dx, float* dscale) {
  const int64_t M = x.dimensions()[0], D = x.dimensions()[1], width = round_up(D, kLanes);
  const int64_t blocks = (M + kBlock - 1) / kBlock;
  static thread_local Arena kept;
  kept.start((blocks + 1) * width);
  float* scale = kept.take(width);
  float* parts = kept.take(blocks * width);
  std::fill(scale + D, scale + width, 0.0f);
  if (of.layers.element_type() == ffi::F32) {
    of.write<float>(scale);
  } else {
    of.write<Half>(scale);
  }
  const auto* from = static_cast<const T*>(x.untyped_data());
  const auto* given = static_cast<const T*>(dy.untyped_data());
  auto* to = static_cast<T*>(dx.untyped_data());
  share_evenly(pool, blocks, M * D, [=](int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(2 * width);
    float* line = arena.take(width);
    float* slope = arena.take(width);
    for (int64_t block = first; block < last; ++block) {
      float* sum_ = parts + block * width;
      std::fill(sum_, sum_ + width, 0.0f);
      for (int64_t i = block * kBlock; i < std::min(M, (block + 1) * kBlock); ++i) {
        for (int64_t j = 0; j < D; ++j) line[j] = widen(from[i * D + j]);
        for (int64_t j = 0; j < D; ++j) slope[j] = widen(given[i * D + j]);
        normalise_gradient(line, slope, scale, D, eps, to + i * D, sum_);
      }
    }
  });
  for (int64_t j = 0; j < D; ++j) {
    float total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += parts[block * width + j];
    dscale[j] = total / of.divisor;
  }
}

ffi::Error rms_norm_gradient_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                  ffi::AnyBuffer scale, ffi::BufferR0<ffi::S32> layer,
                                  ffi::Result<ffi::AnyBuffer> dx,
                                  ffi::Result<ffi::Buffer<ffi::F32>> dscale, float eps,
                                  float offset, float divisor) {
  const Scale of = {scale, *layer.typed_data(), offset, divisor};
  const auto call = x.element_type() == ffi::F32 ? run_gradient<float> : run_gradient<Half>;
  call(pool, x, dy, of, eps, *dx, dscale->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_rms_norm_gradient, fornax::rms_norm_gradient_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<float>("divisor"));

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_add_rms_norm, fornax::add_rms_norm_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<float>("divisor"));
