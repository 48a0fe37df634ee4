// Products of consecutive groups of rows, each with the matrix of its group, and their gradients.
//
// Letters: L layers, M rows, E groups, K inputs, N outputs; x [M, K], w [E, K, N], y [M, N], sizes [E].
// w may also be a stack [L, E, K, N], of which one layer is read where it lies.

#include "grouped_product.h"

namespace fornax {
namespace {

template <typename T, typename Out>
void multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
              const int32_t* sizes, int64_t layer, bool transposed, ffi::AnyBuffer& y) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1];
  const auto sizes_of_w = w.dimensions();
  const bool stacked = sizes_of_w.size() == 4;
  const int64_t E = sizes_of_w[stacked ? 1 : 0], N = y.dimensions()[1];
  layer = std::clamp<int64_t>(layer, 0, stacked ? sizes_of_w[0] - 1 : 0);
  const auto* rows = static_cast<const T*>(x.untyped_data());
  const auto* matrices = static_cast<const T*>(w.untyped_data()) + layer * E * K * N;
  auto* to = static_cast<Out*>(y.untyped_data());
  const std::vector<int64_t> edge = edges(sizes, E, M);
  Tasks tasks;
  for (int64_t e = 0; e < E; ++e) tasks.add(e, edge[e + 1] - edge[e], N);
  const std::vector<Task>& list = tasks.divided(pool.num_threads());
  const int64_t count = static_cast<int64_t>(list.size()), threads = pool.num_threads();
  share_rows(pool, M, count, [&](int64_t i) {
    const Task& t = list[i];
    const Task* later = i + threads < count ? &list[i + threads] : nullptr;
    const Product<T, Out> product = {{rows + edge[t.group] * K, K, false},
                                     {matrices + t.group * K * N, transposed ? K : N, transposed},
                                     K,
                                     to + edge[t.group] * N,
                                     N,
                                     later ? matrices + later->group * K * N + later->left : nullptr};
    product.run(t.top, t.bottom, t.left, t.right);
  });
  std::memset(static_cast<void*>(to + edge[E] * N), 0, (M - edge[E]) * N * sizeof(Out));
}

template <typename T>
void multiply_outer(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& y,
                    const int32_t* sizes, ffi::AnyBuffer& w) {
  const int64_t M = x.dimensions()[0], E = w.dimensions()[0];
  const int64_t K = w.dimensions()[1], N = w.dimensions()[2];
  const auto* left = static_cast<const T*>(x.untyped_data());
  const auto* right = static_cast<const T*>(y.untyped_data());
  auto* to = static_cast<T*>(w.untyped_data());
  const std::vector<int64_t> edge = edges(sizes, E, M);
  Tasks tasks;
  for (int64_t e = 0; e < E; ++e) tasks.add(e, K, N);
  const std::vector<Task>& list = tasks.divided(pool.num_threads());
  share_rows(pool, M, static_cast<int64_t>(list.size()), [&](int64_t i) {
    const Task& t = list[i];
    const int64_t first = edge[t.group], depth = edge[t.group + 1] - first;
    T* c = to + t.group * K * N;
    if (depth > 0) {
      const Product<T> product = {{left + first * K, K, true}, {right + first * N, N, false}, depth,
                                  c, N};
      product.run(t.top, t.bottom, t.left, t.right);
      return;
    }
    for (int64_t r = t.top; r < t.bottom; ++r) {
      std::memset(static_cast<void*>(c + r * N + t.left), 0, (t.right - t.left) * sizeof(T));
    }
  });
}

ffi::Error matmul_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                       ffi::Buffer<ffi::S32> sizes, ffi::BufferR0<ffi::S32> layer,
                       ffi::Result<ffi::AnyBuffer> y, bool transposed) {
  const auto of = x.element_type() == ffi::F32   ? multiply<float, float>
                  : y->element_type() == ffi::F32 ? multiply<Half, float>
                                                  : multiply<Half, Half>;
  of(pool, x, w, sizes.typed_data(), *layer.typed_data(), transposed, *y);
  return ffi::Error::Success();
}

ffi::Error outer_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y,
                      ffi::Buffer<ffi::S32> sizes, ffi::Result<ffi::AnyBuffer> w) {
  const auto of = x.element_type() == ffi::F32 ? multiply_outer<float> : multiply_outer<Half>;
  of(pool, x, y, sizes.typed_data(), *w);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_grouped_matmul, fornax::matmul_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_grouped_outer, fornax::outer_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());
