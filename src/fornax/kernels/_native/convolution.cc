// Convolutions of bfloat16 images or videos whose channels come last, as products of their patches with the kernel:
// parts of the patches of some places at a time are copied into the second cache, and never all of them. So is the
// kernel's gradient, a product of the patches, transposed, with that of the result. The input's, where the stride is
// 1, is a convolution of that with the kernel turned around, which is turned where it is packed.
//
// Letters: B batch, E, H, W frames, rows and columns of the input, C channels in, N out, K = window times C.

#include <cstdint>

#include "axes.h"
#include "bfloat16_product.h"
#include "simd.h"

#if defined(FORNAX_BFLOAT16_PRODUCTS)  // elsewhere the library is empty

namespace fornax {
namespace {

// A kernel [taps, outputs, inputs] turned around and transposed: [outputs, taps inputs], the last tap first; of its
// columns those from `first` on.
template <typename W>
struct Turned {
  const W* kernel;
  int64_t taps, rows, inputs, first, columns;

  // Numbers of a row from `left` on, zeros behind the last.
  __m512i parts(int64_t row, int64_t left) const {
    alignas(64) Half line[kDepth] = {};
    const int64_t end = std::min(left + kDepth, columns);
    for (int64_t k = left, count; k < end; k += count) {
      const int64_t tap = taps - 1 - (first + k) / inputs, input = (first + k) % inputs;
      count = std::min(inputs - input, end - k);
      const W* from = kernel + (tap * rows + row) * inputs + input;
      for (int64_t j = 0; j < count; ++j) narrow(widen(from[j]), line + k - left + j);
    }
    return _mm512_load_si512(line);
  }
};

inline __m512i rounded_32(const Half* from) { return _mm512_loadu_si512(from); }
inline __m512i rounded_32(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

template <typename W>
void rows_of(const Turned<W>& m, int64_t top, int64_t left, __m512i rows[16]) {
  const int64_t tap = m.taps - 1 - (m.first + left) / m.inputs;
  const int64_t input = (m.first + left) % m.inputs;
  // Otherwise more taps than one have a part.
  const bool whole = input + kDepth <= m.inputs && left + kDepth <= m.columns;
  for (int64_t i = 0; i < kTile; ++i) {
    if (top + i >= m.rows) {
      rows[i] = _mm512_setzero_si512();
    } else if (whole) {
      rows[i] = rounded_32(m.kernel + (tap * m.rows + top + i) * m.inputs + input);
    } else {
      rows[i] = m.parts(top + i, left);
    }
  }
}

struct Convolution {
  Axes axes;
  int64_t B, C, N;
  const Half* x;      // [B, E, H, W, C]
  const float* bias;  // null for none

  int64_t K() const { return axes.taps() * C; }
  int64_t M() const { return B * axes.places(); }

  // Elements from `first` to `last` of the patch of place m, of [K]; zeros where it lies outside.
  void copy_patch(int64_t m, int64_t first, int64_t last, Half* to) const {
    const int64_t place = m % axes.places();
    const int64_t at[3] = {place / (axes.out[2] * axes.out[1]), place / axes.out[2] % axes.out[1],
                           place % axes.out[2]};
    const Half* image = x + m / axes.places() * axes.in[0] * axes.in[1] * axes.in[2] * C;
    for (int64_t k = first, count; k < last; k += count, to += count) {
      const int64_t channel = k % C;
      count = std::min(C - channel, last - k);
      int64_t tap = k / C, from = 0, step = 1;
      bool inside = true;
      for (int i = 2; i >= 0; --i, tap /= axes.window[i + 1]) {
        const int64_t index = at[i] * axes.stride[i] + tap % axes.window[i] - axes.before[i];
        inside = inside && index >= 0 && index < axes.in[i];
        from += index * step;
        step *= axes.in[i];
      }
      if (inside) {
        std::memcpy(to, image + from * C + channel, count * sizeof(Half));
      } else {
        std::memset(to, 0, count * sizeof(Half));
      }
    }
  }

  static constexpr int64_t kChunk = 1024;           // of K: patches of some blocks and a panel lie in the second cache
  static constexpr int64_t kRow = kChunk + kDepth;  // between rows of patches, which would share lines of the first
  static constexpr int64_t kBlocks = 4;             // of kSide places, which use a panel while it is there

  // Places from `top` to `bottom`, kBlocks blocks of kSide at most, and columns from `left` to `right`. `panel(j, from,
  // count)` are elements `from` .. `from` + `count` of the packed panel of the columns from j on.
  template <typename Panel>
  void multiply(int64_t top, int64_t bottom, int64_t left, int64_t right, const Panel& panel, Half* y) const {
    const int64_t line = round_up(right - left, kSide), height = round_up(bottom - top, kSide);
    static thread_local Arena kept;
    kept.start(height * kRow / 2 + height * line);
    auto* rows = reinterpret_cast<Half*>(kept.take(height * kRow / 2));
    float* total = kept.take(height * line);
    alignas(64) float sums[kSide * kSide];
    for (int64_t from = 0; from < K(); from += kChunk) {
      const int64_t count = std::min(kChunk, K() - from), tiles = tiles_of(count);
      for (int64_t i = 0; i < height; ++i) {
        Half* to = rows + i * kRow;
        const int64_t some = top + i < bottom ? count : 0;
        copy_patch(top + i, from, from + some, to);
        std::memset(to + some, 0, (tiles * kDepth - some) * sizeof(Half));
      }
      for (int64_t j = left; j < right; j += kSide) {
        const Half* packed = panel(j, from, count);
        for (int64_t i = 0; i < height; i += kSide) {
          float* to = total + i * line + j - left;
          if (from == 0) {
            block_product(tiles, rows + i * kRow, kRow, packed, to, line);
            continue;
          }
          block_product(tiles, rows + i * kRow, kRow, packed, sums, kSide);
          for (int64_t r = 0; r < kSide; ++r) {
            for (int64_t c = 0; c < kSide; ++c) to[r * line + c] += sums[r * kSide + c];
          }
        }
      }
    }
    for (int64_t i = 0; i < bottom - top; ++i) {
      float* of_row = total + i * line;
      for (int64_t j = left; bias && j < right; ++j) of_row[j - left] += bias[j];
      put_row(of_row, right - left, y + (top + i) * N + left);
    }
  }

  // `pack(i, from, count, to)` packs elements of K of panel i of the kernel, [K, N].
  template <typename Pack>
  void run(ffi::ThreadPool& pool, const Pack& pack, Half* y) const {
    const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), panels = blocks_of(N);
    if (M() <= kBlocks * kSide) {  // each part of a panel is used once: it is packed there
      const int64_t parts = threads == 1 ? 1 : std::min(panels, 2 * threads);
      parallel_for(pool, parts, [&](int64_t part) {
        const Tiles tiles;
        Arena& arena = Arena::of_this_thread();
        arena.start(kSide * kChunk / 2);
        auto* packed = reinterpret_cast<Half*>(arena.take(kSide * kChunk / 2));
        const auto panel = [&](int64_t j, int64_t from, int64_t count) {
          pack(j / kSide, from, count, packed);
          return packed;
        };
        const int64_t left = panels * part / parts * kSide, right = panels * (part + 1) / parts * kSide;
        multiply(0, M(), left, std::min(right, N), panel, y);
      });
      return;
    }
    const int64_t depth = tiles_of(K()) * kDepth;
    static thread_local Arena kept;
    kept.start(panels * kSide * depth / 2);
    auto* whole = reinterpret_cast<Half*>(kept.take(panels * kSide * depth / 2));
    parallel_for(pool, panels, [&](int64_t i) { pack(i, 0, K(), whole + i * kSide * depth); });
    const auto panel = [&](int64_t j, int64_t from, int64_t) { return whole + j * depth + from * kSide; };
    // As few blocks at once as give each thread some.
    const int64_t step = kSide * std::clamp<int64_t>(blocks_of(M()) / (4 * threads), 1, kBlocks);
    parallel_for(pool, (M() + step - 1) / step, [&](int64_t part) {
      const Tiles tiles;
      multiply(part * step, std::min((part + 1) * step, M()), 0, N, panel, y);
    });
  }
};

// The places of a result in order, each with where one tap of its window lies in the input.
class Walk {
 public:
  Walk(const Convolution& of, int64_t tap, int64_t channel) : of_(of), image_(of.x + channel) {
    for (int i = 2; i >= 0; --i) {
      tap_[i] = tap % of.axes.window[i] - of.axes.before[i];
      tap /= of.axes.window[i];
    }
  }

  // That of the next place; null where it lies outside.
  const Half* next() {
    const Axes& axes = of_.axes;
    int64_t from = 0;
    bool inside = true;
    for (int i = 0; i < 3; ++i) {
      const int64_t index = at_[i] * axes.stride[i] + tap_[i];
      inside = inside && index >= 0 && index < axes.in[i];
      from = from * axes.in[i] + index;
    }
    const Half* found = inside ? image_ + from * of_.C : nullptr;
    int i = 2;
    while (i >= 0 && ++at_[i] == axes.out[i]) at_[i--] = 0;
    if (i < 0) image_ += axes.in[0] * axes.in[1] * axes.in[2] * of_.C;
    return found;
  }

 private:
  const Convolution& of_;
  const Half* image_;
  int64_t tap_[3], at_[3] = {0, 0, 0};
};

// dkernel[K, N] = patches[M, K]^T dy[M, N]: of one tap and 32 channels at a time, `kChunk` places in the second cache.
// Sums over all places are float32, in the order of the places.
template <typename W>
struct KernelGradient {
  static constexpr int64_t kChunk = 512;

  Convolution c;
  const Half* dy;
  W* dkernel;

  // 32 places of a walk become 32 pairs of columns: rows of channels, `kChunk` apart.
  static void transpose(Walk& walk, int64_t places, int64_t channels, Half* to) {
    const Half* at[kDepth] = {};
    for (int64_t i = 0; i < places; ++i) at[i] = walk.next();
    const __m256i zero = _mm256_setzero_si256();
    for (int64_t half = 0; half < 2; ++half) {
      const __mmask16 some = first_16(channels - half * kTile);
      __m512i rows[16];
      for (int64_t i = 0; i < kTile; ++i) {
        const Half *low = at[2 * i], *high = at[2 * i + 1];
        const __m256i a = low ? _mm256_maskz_loadu_epi16(some, low + half * kTile) : zero;
        const __m256i b = high ? _mm256_maskz_loadu_epi16(some, high + half * kTile) : zero;
        rows[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
      }
      transpose_words(rows);
      for (int64_t i = 0; i < kTile; ++i) _mm512_storeu_si512(to + (half * kTile + i) * kChunk, rows[i]);
    }
  }

  // Panels from `first` to `last` of the rows of one tap and block of channels.
  void multiply(int64_t tap, int64_t block, int64_t first, int64_t last, const Half* panels) const {
    const int64_t depth = tiles_of(c.M()) * kDepth, width = (last - first) * kSide;
    const int64_t channels = std::min(kSide, c.C - block * kSide);
    Arena& arena = Arena::of_this_thread();
    arena.start(kSide * (width + kSide) + kSide * kChunk / 2);
    float *total = arena.take(kSide * width), *sums = arena.take(kSide * kSide);
    auto* rows = reinterpret_cast<Half*>(arena.take(kSide * kChunk / 2));
    std::fill(total, total + kSide * width, 0.0f);
    Walk walk(c, tap, block * kSide);
    for (int64_t from = 0; from < depth; from += kChunk) {
      const int64_t tiles = tiles_of(std::min(kChunk, depth - from));
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t left = c.M() - from - t * kDepth;
        transpose(walk, std::min(kDepth, left), channels, rows + t * kDepth);
      }
      for (int64_t p = first; p < last; ++p) {
        const Half* panel = panels + (p * depth + from) * kSide;
        block_product(tiles, rows, kChunk, panel, sums, kSide, channels);
        for (int64_t i = 0; i < channels; ++i) {
          float* to = total + i * width + (p - first) * kSide;
          for (int64_t j = 0; j < kSide; ++j) to[j] += sums[i * kSide + j];
        }
      }
    }
    for (int64_t i = 0; i < channels; ++i) {
      const int64_t left = first * kSide, columns = std::min(width, c.N - left);
      put_row(total + i * width, columns, dkernel + (tap * c.C + block * kSide + i) * c.N + left);
    }
  }

  void run(ffi::ThreadPool& pool) const {
    const int64_t depth = tiles_of(c.M()) * kDepth, panels = blocks_of(c.N), blocks = blocks_of(c.C);
    static thread_local Arena kept;
    kept.start(panels * kSide * depth / 2);
    auto* right = reinterpret_cast<Half*>(kept.take(panels * kSide * depth / 2));
    const Matrix gradients = {dy, c.M(), c.N, c.N};
    parallel_for(pool, panels, [&](int64_t i) { pack_panel(gradients, i, right + i * kSide * depth); });
    // Columns are divided too where there are few rows: each part makes the same rows again.
    const int64_t strips = c.axes.taps() * blocks;
    const int64_t wanted = 4 * std::max<int64_t>(pool.num_threads(), 1);
    const int64_t parts = std::clamp<int64_t>((wanted + strips - 1) / strips, 1, panels);
    parallel_for(pool, strips * parts, [&](int64_t item) {
      const Tiles tiles;
      const int64_t strip = item / parts, part = item % parts;
      multiply(strip / blocks, strip % blocks, panels * part / parts, panels * (part + 1) / parts, right);
    });
  }
};

Convolution read_call(const ffi::AnyBuffer& x, ffi::AnyBuffer::Dimensions kernel,
                      ffi::AnyBuffer::Dimensions y, ffi::Span<const int64_t> stride,
                      ffi::Span<const int64_t> before) {
  const auto xd = x.dimensions();
  return {read_axes(x, kernel, y, stride, before), xd[0], xd[4], y[4],
          static_cast<const Half*>(x.untyped_data()), nullptr};
}

template <typename W>
void convolve(ffi::ThreadPool& pool, const Convolution& c, const W* kernel, bool turned, Half* y) {
  c.run(pool, [&](int64_t i, int64_t from, int64_t count, Half* to) {
    if (turned) {
      pack_panel_transposed(Turned<W>{kernel, c.axes.taps(), c.N, c.C, from, count}, i, to);
    } else {
      pack_panel(MatrixOf<W>{kernel + from * c.N, count, c.N, c.N}, i, to);
    }
  }, y);
}

ffi::Error convolution_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                            ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y,
                            ffi::Span<const int64_t> stride, ffi::Span<const int64_t> before,
                            bool turned) {
  Convolution c = read_call(x, kernel.dimensions(), y->dimensions(), stride, before);
  c.bias = bias.element_count() ? bias.typed_data() : nullptr;
  Half* to = static_cast<Half*>(y->untyped_data());
  if (kernel.element_type() == ffi::F32) {
    convolve(pool, c, static_cast<const float*>(kernel.untyped_data()), turned, to);
  } else {
    convolve(pool, c, static_cast<const Half*>(kernel.untyped_data()), turned, to);
  }
  return ffi::Error::Success();
}

ffi::Error kernel_gradient_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                ffi::Result<ffi::AnyBuffer> dkernel, ffi::Span<const int64_t> stride,
                                ffi::Span<const int64_t> before) {
  const Convolution c = read_call(x, dkernel->dimensions(), dy.dimensions(), stride, before);
  const Half* slopes = static_cast<const Half*>(dy.untyped_data());
  if (dkernel->element_type() == ffi::F32) {
    KernelGradient<float>{c, slopes, static_cast<float*>(dkernel->untyped_data())}.run(pool);
  } else {
    KernelGradient<Half>{c, slopes, static_cast<Half*>(dkernel->untyped_data())}.run(pool);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_convolution, fornax::convolution_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("stride")
                                  .Attr<xla::ffi::Span<const int64_t>>("before")
                                  .Attr<bool>("turned"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_convolution_kernel_gradient, fornax::kernel_gradient_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("stride")
                                  .Attr<xla::ffi::Span<const int64_t>>("before"));

#endif  // FORNAX_BFLOAT16_PRODUCTS
