// Convolutions of images or videos whose channels come last in float32 arithmetic, as products of their
// patches with the kernel. Patches are copied by blocks, where a product copies its operand anyway, and
// lie nowhere as a whole. The kernel's gradient is the product of the patches, transposed, with that of
// the result. The input's, where the stride is 1, is a convolution of that with the kernel turned around,
// which is turned where it is copied.
//
// Letters: B batch, E, H, W frames, rows and columns of the input, C channels in, N out, K = window times C,
// M places of the result.

#include "axes.h"
#include "float32_product.h"

namespace fornax {
namespace {

// The matrix of patches, [M, K], or [K, M] if `transposed`; zeros where a window lies outside.
template <typename T>
struct Patches {
  const T* x;  // [B, E, H, W, C]
  Axes axes;
  int64_t C;
  bool transposed;

  // One place of the result: its image, and where on it.
  struct Place {
    const T* image;
    int64_t at[3];
  };

  Place place(int64_t m) const {
    const int64_t all = axes.places(), within = m % all, row = within / axes.out[2];
    return {x + m / all * image(), {row / axes.out[1], row % axes.out[1], within % axes.out[2]}};
  }

  void advance(Place& place) const {
    int i = 2;
    while (i >= 0 && ++place.at[i] == axes.out[i]) place.at[i--] = 0;
    if (i < 0) place.image += image();
  }

  // The channels under one tap of the window; null outside.
  const T* under(const Place& place, int64_t tap) const {
    int64_t offset[3];
    for (int i = 2; i >= 0; --i) {
      offset[i] = tap % axes.window[i] - axes.before[i];
      tap /= axes.window[i];
    }
    int64_t from = 0;
    for (int i = 0; i < 3; ++i) {
      const int64_t index = place.at[i] * axes.stride[i] + offset[i];
      if (index < 0 || index >= axes.in[i]) return nullptr;
      from = from * axes.in[i] + index;
    }
    return place.image + from * C;
  }

 private:
  int64_t image() const { return axes.in[0] * axes.in[1] * axes.in[2] * C; }
};

// Rows are places: a panel's are copied tap by tap.
template <typename T>
void copy_places(const Patches<T>& a, int64_t top, int64_t rows, int64_t first, int64_t depth,
                 float* to) {
  typename Patches<T>::Place next = a.place(top);
  for (int64_t i = 0; i < round_up(rows, kHigh); ++i, a.advance(next)) {
    float* row = to + i / kHigh * kHigh * kDepth + ByRow::place(i % kHigh, 0);
    for (int64_t k = 0, count; k < depth; k += count) {
      const int64_t tap = (first + k) / a.C, channel = (first + k) % a.C;
      count = std::min(a.C - channel, depth - k);
      const T* line = i < rows ? a.under(next, tap) : nullptr;
      copy_line(line != nullptr ? line + channel : nullptr, count, row + k);
    }
  }
}

// Rows are channels under a tap, the depth is over places: where those lie is found once for a tap.
template <typename T>
void copy_channels(const Patches<T>& a, int64_t top, int64_t rows, int64_t first, int64_t depth,
                   float* to) {
  const T* lines[kDepth];
  int64_t found = -1;
  for (int64_t i = 0; i < rows; i += kHigh, to += kHigh * kDepth) {
    const int64_t some = std::min<int64_t>(kHigh, rows - i);
    for (int64_t r = 0, count; r < kHigh; r += count) {
      const int64_t tap = (top + i + r) / a.C, channel = (top + i + r) % a.C;
      count = r < some ? std::min(a.C - channel, some - r) : kHigh - r;
      if (r < some && tap != found) {
        typename Patches<T>::Place next = a.place(first);
        for (int64_t k = 0; k < depth; ++k, a.advance(next)) lines[k] = a.under(next, tap);
        found = tap;
      }
      for (int64_t k = 0; k < depth; ++k) {
        const T* line = r < some ? lines[k] : nullptr;
        float* at = to + k * kHigh + r;
        if (line == nullptr) {
          for (int64_t q = 0; q < count; ++q) at[q] = 0;
        } else if (count == kHigh) {  // the usual case, of a known length
          for (int64_t q = 0; q < kHigh; ++q) at[q] = widen(line[channel + q]);
        } else {
          for (int64_t q = 0; q < count; ++q) at[q] = widen(line[channel + q]);
        }
      }
    }
  }
}

template <typename T>
void copy_a(const Patches<T>& a, int64_t top, int64_t rows, int64_t first, int64_t depth, float* to) {
  (a.transposed ? copy_channels<T> : copy_places<T>)(a, top, rows, first, depth, to);
}

// A kernel [taps, outputs, inputs] turned around: [taps inputs, outputs], the last tap first.
template <typename T>
struct Turned {
  const T* kernel;
  int64_t taps, inputs, outputs;
};

template <typename T>
void copy_b(const Turned<T>& b, int64_t left, int64_t columns, int64_t first, int64_t depth,
            float* to) {
  for (int64_t j = 0; j < columns; j += kWide, to += kWide * depth) {
    for (int64_t k = 0, count; k < depth; k += count) {
      const int64_t tap = b.taps - 1 - (first + k) / b.inputs, input = (first + k) % b.inputs;
      count = std::min(b.inputs - input, depth - k);
      const Operand<T> of_tap = {b.kernel + tap * b.outputs * b.inputs, b.inputs, true};
      copy_b(of_tap, left + j, std::min(kWide, columns - j), input, count, to + k * kWide);
    }
  }
}

template <typename T>
Patches<T> patches_of(const ffi::AnyBuffer& x, const Axes& axes, bool transposed) {
  return {static_cast<const T*>(x.untyped_data()), axes, x.dimensions()[4], transposed};
}

template <typename T>
void convolve(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Axes& axes,
              const ffi::AnyBuffer& kernel, bool turned, const float* bias, ffi::AnyBuffer& y) {
  const int64_t M = x.dimensions()[0] * axes.places(), N = y.dimensions()[4];
  const int64_t C = x.dimensions()[4], K = axes.taps() * C;
  const Patches<T> patches = patches_of<T>(x, axes, false);
  const T* weights = static_cast<const T*>(kernel.untyped_data());
  T* to = static_cast<T*>(y.untyped_data());
  if (turned) {
    share_product(pool, patches, Turned<T>{weights, axes.taps(), C, N}, M, N, K, bias, to);
  } else {
    share_product(pool, patches, Operand<T>{weights, N, false}, M, N, K, bias, to);
  }
}

template <typename T>
void kernel_gradient(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Axes& axes,
                     const ffi::AnyBuffer& dy, ffi::AnyBuffer& dkernel) {
  const int64_t N = dy.dimensions()[4], K = axes.taps() * x.dimensions()[4];
  const Operand<T> gradients = {static_cast<const T*>(dy.untyped_data()), N, false};
  share_product(pool, patches_of<T>(x, axes, true), gradients, K, N,
                x.dimensions()[0] * axes.places(), nullptr, static_cast<T*>(dkernel.untyped_data()));
}

ffi::Error convolution_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                            ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y,
                            ffi::Span<const int64_t> stride, ffi::Span<const int64_t> before,
                            bool turned) {
  const Axes axes = read_axes(x, kernel.dimensions(), y->dimensions(), stride, before);
  const float* added = bias.element_count() ? bias.typed_data() : nullptr;
  const auto run = x.element_type() == ffi::F32 ? convolve<float> : convolve<Half>;
  run(pool, x, axes, kernel, turned, added, *y);
  return ffi::Error::Success();
}

ffi::Error kernel_gradient_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                ffi::Result<ffi::AnyBuffer> dkernel,
                                ffi::Span<const int64_t> stride, ffi::Span<const int64_t> before) {
  const Axes axes = read_axes(x, dkernel->dimensions(), dy.dimensions(), stride, before);
  const auto run = x.element_type() == ffi::F32 ? kernel_gradient<float> : kernel_gradient<Half>;
  run(pool, x, axes, dy, *dkernel);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_float32_convolution, fornax::convolution_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("stride")
                                  .Attr<xla::ffi::Span<const int64_t>>("before")
                                  .Attr<bool>("turned"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_float32_convolution_kernel_gradient,
                              fornax::kernel_gradient_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("stride")
                                  .Attr<xla::ffi::Span<const int64_t>>("before"));
