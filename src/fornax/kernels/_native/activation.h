// The activation between the products of a gated MLP.

#ifndef FORNAX_KERNELS_ACTIVATION_H_
#define FORNAX_KERNELS_ACTIVATION_H_

#include "simd.h"

namespace fornax {

inline Vec logistic(Vec x) {
  const Vec value = 1.0f / (1.0f + exponential(-x));
  return where(x != x, x, where(x < -87.0f, Vec{}, value));
}

// What is made of the products with gate and up.
struct Activation {
  bool gelu;
  float clip, gain;  // of the clipped activation; 0 for none

  // Of the gated unit without a clip: the gradients of gate and up, in their places, from that of
  // the result.
  void gradient(const float* dy, float* gate, float* up, int64_t count) const {
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      const Vec g = load(gate + j), u = load(up + j), d = load(dy + j);
      Vec slope;
      const Vec value = with_slope(g, &slope);
      store(gate + j, d * u * slope);
      store(up + j, d * value);
    }
    if (j == count) return;
    const int64_t bytes = (count - j) * sizeof(float);
    Vec d = {}, g = {}, u = {}, slope;
    std::memcpy(&d, dy + j, bytes);
    std::memcpy(&g, gate + j, bytes);
    std::memcpy(&u, up + j, bytes);
    const Vec value = with_slope(g, &slope);
    const Vec dg = d * u * slope, du = d * value;
    std::memcpy(gate + j, &dg, bytes);
    std::memcpy(up + j, &du, bytes);
  }

  void run(float* gate, const float* up, int64_t count) const {
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(gate + j, of(load(gate + j), load(up + j)));
    if (j == count) return;
    Vec rest[2] = {};
    std::memcpy(&rest[0], gate + j, (count - j) * sizeof(float));
    std::memcpy(&rest[1], up + j, (count - j) * sizeof(float));
    rest[0] = of(rest[0], rest[1]);
    std::memcpy(gate + j, &rest[0], (count - j) * sizeof(float));
  }

 private:
  // The activation, and its derivative.
  Vec with_slope(Vec x, Vec* slope) const {
    Vec inner = x, growth = splat(1.0f);
    if (gelu) {
      const float factor = 1.5957691216057308f;  // sqrt(8 / pi)
      inner = factor * (x + 0.044715f * x * x * x);
      growth = factor * (1.0f + 3 * 0.044715f * x * x);
    }
    const Vec s = logistic(inner);
    *slope = s + x * s * (1.0f - s) * growth;
    return x * s;
  }

  Vec of(Vec gate, Vec up) const {
    if (clip > 0) {
      const Vec most = splat(clip);  // a comparison with NaN is false, and NaN stays
      gate = most < gate ? most : gate;
      up = most < up ? most : up;
      up = up < -most ? -most : up;
      return (up + 1.0f) * gate * logistic(gain * gate);
    }
    if (gelu) {
      const float factor = 1.5957691216057308f;  // sqrt(8 / pi)
      return gate * logistic(factor * (gate + 0.044715f * gate * gate * gate)) * up;
    }
    return gate * logistic(gate) * up;
  }
};

}  // namespace fornax

#endif  // FORNAX_KERNELS_ACTIVATION_H_
