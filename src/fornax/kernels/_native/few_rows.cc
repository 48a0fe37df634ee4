// Products of a few rows with a matrix of each of several layers, which lie in one array: c = a b, a b^T or a^T b,
// layer by layer. A matrix of weights is read once, or a gradient of it written once, in the order in which it lies in
// memory; nothing else takes time.
//
// Letters: L layers, M rows, of which there are few, K inputs, N outputs. x [L, M, K], w [L, K, N], y [L, M, N].

#include <algorithm>
#include <vector>

#include "simd.h"

namespace fornax {
namespace {

constexpr int64_t kSpan = 1024;   // columns whose sums stay in the first cache
constexpr int64_t kTogether = 4;  // rows of w that are read side by side
constexpr int64_t kTasks = 4;     // of each thread

// Numbers of w, rounded to bfloat16 where x is.
template <bool rounded, typename W>
inline Vec read(const W* from) {
  Vec v = load_wide(from);
  if constexpr (rounded) {
    Half narrow[kLanes];
    store_narrow(narrow, v);
    v = load_wide(narrow);
  }
  return v;
}

template <bool rounded, typename W>
inline float read_one(const W* from) {
  float value = widen(*from);
  if constexpr (rounded) {
    Half half;
    narrow(value, &half);
    value = widen(half);
  }
  return value;
}

// y[M, first .. last) = x[M, K] w[K, N].
template <bool rounded, typename W>
void forward(int64_t M, int64_t K, int64_t N, const float* x, const W* w, int64_t first,
             int64_t last, float* y) {
  for (int64_t m = 0; m < M; ++m) std::fill(y + m * N + first, y + m * N + last, 0.0f);
  for (int64_t left = first; left < last; left += kSpan) {
    const int64_t right = std::min(last, left + kSpan);
    const int64_t whole = left + (right - left) / kLanes * kLanes;
    for (int64_t k = 0; k < K; k += kTogether) {
      const int64_t rows = std::min(kTogether, K - k);
      for (int64_t j = left; j < whole; j += kLanes) {
        Vec line[kTogether] = {};
        for (int64_t r = 0; r < rows; ++r) line[r] = read<rounded>(w + (k + r) * N + j);
        for (int64_t m = 0; m < M; ++m) {
          Vec sum = load(y + m * N + j);
          const float* of_row = x + m * K + k;
          for (int64_t r = 0; r < rows; ++r) sum += of_row[r] * line[r];
          store(y + m * N + j, sum);
        }
      }
      for (int64_t j = whole; j < right; ++j) {
        for (int64_t r = 0; r < rows; ++r) {
          const float value = read_one<rounded>(w + (k + r) * N + j);
          for (int64_t m = 0; m < M; ++m) y[m * N + j] += x[m * K + k + r] * value;
        }
      }
    }
  }
}

// dx[M, first .. last) = dy[M, N] w[K, N]^T.
template <bool rounded, typename W>
void input_gradient(int64_t M, int64_t K, int64_t N, const float* dy, const W* w, int64_t first,
                    int64_t last, float* dx) {
  const int64_t whole = N / kLanes * kLanes;
  for (int64_t k = first; k < last; k += kTogether) {
    const int64_t rows = std::min(kTogether, last - k);
    for (int64_t top = 0; top < M; top += kTogether) {
      const int64_t some = std::min(kTogether, M - top);
      Vec sums[kTogether][kTogether];
      clear(sums);
      const auto add = [&](int64_t j, int64_t of_w, int64_t of_dy) {
        Vec line[kTogether];
        for (int64_t r = 0; r < of_w; ++r) line[r] = read<rounded>(w + (k + r) * N + j);
        for (int64_t m = 0; m < of_dy; ++m) {
          const Vec slope = load(dy + (top + m) * N + j);
          for (int64_t r = 0; r < of_w; ++r) sums[m][r] += slope * line[r];
        }
      };
      if (rows == kTogether && some == kTogether) {  // of known lengths
        for (int64_t j = 0; j < whole; j += kLanes) add(j, kTogether, kTogether);
      } else if (rows == kTogether && some == 2) {
        for (int64_t j = 0; j < whole; j += kLanes) add(j, kTogether, 2);
      } else if (rows == kTogether && some == 1) {
        for (int64_t j = 0; j < whole; j += kLanes) add(j, kTogether, 1);
      } else {
        for (int64_t j = 0; j < whole; j += kLanes) add(j, rows, some);
      }
      for (int64_t m = 0; m < some; ++m) {
        for (int64_t r = 0; r < rows; ++r) {
          float total = sum(sums[m][r]);
          for (int64_t j = whole; j < N; ++j) {
            total += dy[(top + m) * N + j] * read_one<rounded>(w + (k + r) * N + j);
          }
          dx[(top + m) * K + k + r] = total;
        }
      }
    }
  }
}

inline void store_past_caches(float* to, Vec v) {
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof v == 0) return _mm512_stream_ps(to, (__m512)v);
#endif
  store(to, v);
}

// dw[first .. last, N] = x[M, K]^T dy[M, N].
void weight_gradient(int64_t M, int64_t K, int64_t N, const float* x, const float* dy,
                     int64_t first, int64_t last, float* dw) {
  const int64_t whole = N / kLanes * kLanes;
  for (int64_t k = first; k < last; ++k) {
    for (int64_t j = 0; j < whole; j += kLanes) {
      Vec sum = {};
      for (int64_t m = 0; m < M; ++m) sum += x[m * K + k] * load(dy + m * N + j);
      store_past_caches(dw + k * N + j, sum);
    }
    for (int64_t j = whole; j < N; ++j) {
      float sum = 0;
      for (int64_t m = 0; m < M; ++m) sum += x[m * K + k] * dy[m * N + j];
      dw[k * N + j] = sum;
    }
  }
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// Of few rows, as float32.
std::vector<float> widened(const ffi::AnyBuffer& rows) {
  std::vector<float> wide(rows.element_count());
  if (rows.element_type() == ffi::F32) {
    std::memcpy(wide.data(), rows.untyped_data(), wide.size() * sizeof(float));
  } else {
    const auto* from = static_cast<const Half*>(rows.untyped_data());
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = widen(from[i]);
  }
  return wide;
}

// Divides `count` columns or rows of each of L layers among threads, in whole vectors.
template <typename Work>
void share_layers(ffi::ThreadPool& pool, int64_t L, int64_t count, const Work& work) {
  const int64_t wanted = kTasks * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t parts = std::clamp<int64_t>((wanted + L - 1) / L, 1, (count + kLanes - 1) / kLanes);
  const auto at = [&](int64_t part) { return std::min(count, round_up(count * part / parts, kLanes)); };
  parallel_for(pool, L * parts, [&](int64_t i) {
    const int64_t part = i % parts;
    work(i / parts, at(part), at(part + 1));
  });
}

template <bool rounded, typename W>
void multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& a, const ffi::AnyBuffer& w, bool transposed,
              float* to) {
  const auto d = w.dimensions();
  const int64_t L = d[0], M = a.dimensions()[1], K = d[1], N = d[2];
  const std::vector<float> rows = widened(a);
  const auto* weights = static_cast<const W*>(w.untyped_data());
  share_layers(pool, L, transposed ? K : N, [&](int64_t l, int64_t first, int64_t last) {
    const W* of_layer = weights + l * K * N;
    if (transposed) {
      input_gradient<rounded>(M, K, N, rows.data() + l * M * N, of_layer, first, last, to + l * M * K);
    } else {
      forward<rounded>(M, K, N, rows.data() + l * M * K, of_layer, first, last, to + l * M * N);
    }
  });
}

ffi::Error call(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                ffi::Result<ffi::Buffer<ffi::F32>> c, int64_t form) {
  float* to = c->typed_data();
  if (form == 2) {
    const auto d = c->dimensions();
    const int64_t L = d[0], M = a.dimensions()[1], K = d[1], N = d[2];
    const std::vector<float> x = widened(a), dy = widened(b);
    share_layers(pool, L, K, [&](int64_t l, int64_t first, int64_t last) {
      weight_gradient(M, K, N, x.data() + l * M * K, dy.data() + l * M * N, first, last, to + l * K * N);
    });
    return ffi::Error::Success();
  }
  if (b.element_type() == ffi::BF16) {
    multiply<false, Half>(pool, a, b, form == 1, to);
  } else if (a.element_type() == ffi::BF16) {
    multiply<true, float>(pool, a, b, form == 1, to);
  } else {
    multiply<false, float>(pool, a, b, form == 1, to);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_few_rows, fornax::call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("form"));
