// Products of matrices in float32 arithmetic: a b, a b^T and a^T b.

#include "float32_product.h"

namespace fornax {
namespace {

template <typename From, typename To>
void call_of(ffi::ThreadPool& pool, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
             ffi::AnyBuffer& c, int64_t form) {
  const bool left_transposed = form == 2, right_transposed = form == 1;
  const auto of_a = a.dimensions(), of_b = b.dimensions(), of_c = c.dimensions();
  const int64_t M = of_c[0], N = of_c[1], K = of_a[left_transposed ? 0 : 1];
  const Operand<From> from_a = {static_cast<const From*>(a.untyped_data()), of_a[1],
                                left_transposed};
  const Operand<From> from_b = {static_cast<const From*>(b.untyped_data()), of_b[1],
                                right_transposed};
  To* to = static_cast<To*>(c.untyped_data());
  share_product(pool, from_a, from_b, M, N, K, nullptr, to);
}

ffi::Error call(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                ffi::Result<ffi::AnyBuffer> c, int64_t form) {
  const auto from = a.element_type(), to = c->element_type();
  if (b.element_type() != from) return ffi::Error::InvalidArgument("operands differ in type");
  if (from == ffi::F32 && to == ffi::F32) {
    call_of<float, float>(pool, a, b, *c, form);
  } else if (from == ffi::BF16 && to == ffi::BF16) {
    call_of<Half, Half>(pool, a, b, *c, form);
  } else if (from == ffi::BF16 && to == ffi::F32) {
    call_of<Half, float>(pool, a, b, *c, form);
  } else {
    return ffi::Error::InvalidArgument("matrices are float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_float32_matmul, fornax::call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("form"));
