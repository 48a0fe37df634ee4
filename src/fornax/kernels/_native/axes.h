// The axes of a convolution's input, window and result, as its calls give them.

#ifndef FORNAX_KERNELS_AXES_H_
#define FORNAX_KERNELS_AXES_H_

#include <cstdint>

#include "simd.h"

namespace fornax {

// Of the axes E, H, W.
struct Axes {
  int64_t in[3], out[3], window[3], stride[3], before[3];

  int64_t places() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return window[0] * window[1] * window[2]; }
};

// Of x [B, E, H, W, C], a kernel [e, h, w, C, N] and a result [B, E, H, W, N].
inline Axes read_axes(const ffi::AnyBuffer& x, ffi::AnyBuffer::Dimensions kernel,
                      ffi::AnyBuffer::Dimensions y, ffi::Span<const int64_t> stride,
                      ffi::Span<const int64_t> before) {
  Axes axes;
  for (int i = 0; i < 3; ++i) {
    axes.in[i] = x.dimensions()[i + 1];
    axes.out[i] = y[i + 1];
    axes.window[i] = kernel[i];
    axes.stride[i] = stride[i];
    axes.before[i] = before[i];
  }
  return axes;
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_AXES_H_
