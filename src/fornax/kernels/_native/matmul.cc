// Products of bfloat16 matrices, and Muon's orthogonalization made of them.
//
// Letters: M rows, K summed over, N columns; B matrices, n <= m the sides of one.

#include <cmath>

#include "bfloat16_product.h"
#include "simd.h"

#if defined(FORNAX_BFLOAT16_PRODUCTS)  // elsewhere the library is empty

namespace fornax {
namespace {

enum Form : int64_t { kPlain = 0, kRightTransposed = 1, kLeftTransposed = 2 };

Half* halves(Arena& arena, int64_t count) {
  return reinterpret_cast<Half*>(arena.take(round_up(count, 32) / 2));
}

// One product; `a` and `b` as they lie in memory.
template <typename T>
struct Product {
  Form form;
  Matrix a, b;
  int64_t M, N, K;
  T* c;

  // Rows of whole tiles are multiplied where they are.
  bool in_place() const { return form != kLeftTransposed && K % kDepth == 0; }
  int64_t depth() const { return tiles_of(K) * kDepth; }

  // The shorter side is packed first. A block of the longer is packed where it is multiplied with all of
  // that, and so while it is in the second cache.
  void run(ffi::ThreadPool& pool) const {
    const int64_t panels = blocks_of(N), blocks = blocks_of(M), size = kSide * depth();
    const int64_t first = in_place() ? M / kSide : 0;  // the first block of rows that is copied
    const bool by_rows = blocks >= panels;
    const int64_t short_side = by_rows ? panels : blocks, done = by_rows ? 0 : first;
    static thread_local Arena kept;
    kept.start(short_side * size / 2);
    Half* const whole = halves(kept, short_side * size);
    const int64_t parts = short_side - done;
    in_parts(pool, parts, parts * size >= kWorthPacking, [&](int64_t i) {
      by_rows ? pack(i, whole + i * size) : pack_block(done + i, whole + (done + i) * size);
    });
    in_parts(pool, by_rows ? blocks : panels, M * N * K >= worth_sharing(), [&](int64_t i) {
      const Tiles tiles;
      Arena& arena = Arena::of_this_thread();
      arena.start(size / 2);
      Half* const own = halves(arena, size);
      if (!by_rows) {
        pack(i, own);
      } else if (i >= first) {
        pack_block(i, own);
      }
      for (int64_t j = 0; j < short_side; ++j) {
        const int64_t block = by_rows ? i : j, panel = by_rows ? j : i;
        const Half *rows = a.at + block * kSide * a.row, *copied = by_rows ? own : whole + j * size;
        const bool there = block < first;
        multiply(there ? rows : copied, there ? a.row : depth(), by_rows ? whole + j * size : own,
                 block, panel);
      }
    });
  }

  void pack(int64_t panel, Half* to) const {
    form == kRightTransposed ? pack_panel_transposed(b, panel, to) : pack_panel(b, panel, to);
  }
  void pack_block(int64_t block, Half* to) const {
    (form == kLeftTransposed ? pack_rows_transposed : pack_rows)(a, block, to);
  }

  void multiply(const Half* rows, int64_t row, const Half* panel, int64_t block,
                int64_t index) const {
    const int64_t top = block * kSide, from = index * kSide;
    const int64_t height = std::min(kSide, M - top), width = std::min(kSide, N - from);
    alignas(64) float sums[kSide * kSide];
    block_product(tiles_of(K), rows, row, panel, sums, kSide);
    for (int64_t i = 0; i < height; ++i) put_row(sums + i * kSide, width, c + (top + i) * N + from);
  }

  // Elements that are packed, and multiplications, in the time that a second thread takes to come.
  static constexpr int64_t kWorthPacking = 1 << 20;
  static int64_t worth_sharing() { return int64_t{1} << (has_tiles() ? 26 : 23); }

  template <typename Work>
  static void in_parts(ffi::ThreadPool& pool, int64_t count, bool shared, const Work& work) {
    const int64_t parts = shared ? std::min<int64_t>(4 * pool.num_threads(), count) : 1;
    const auto part = [&](int64_t p) {
      for (int64_t i = count * p / parts; i < count * (p + 1) / parts; ++i) work(i);
    };
    if (parts <= 1 || pool.num_threads() <= 1) {
      for (int64_t p = 0; p < parts; ++p) part(p);
    } else {
      parallel_for(pool, parts, part);
    }
  }
};

template <typename T>
void multiply(ffi::ThreadPool& pool, Form form, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
              ffi::AnyBuffer& c) {
  const auto ad = a.dimensions(), bd = b.dimensions();
  const int64_t rank = ad.size();
  const int64_t ar = ad[rank - 2], ac = ad[rank - 1], br = bd[rank - 2], bc = bd[rank - 1];
  int64_t batch = 1;
  for (int64_t i = 0; i < rank - 2; ++i) batch *= ad[i];
  const int64_t M = form == kLeftTransposed ? ac : ar, K = form == kLeftTransposed ? ar : ac;
  const int64_t N = form == kRightTransposed ? br : bc;
  const auto* left = static_cast<const Half*>(a.untyped_data());
  const auto* right = static_cast<const Half*>(b.untyped_data());
  auto* to = static_cast<T*>(c.untyped_data());
  for (int64_t i = 0; i < batch; ++i) {
    Product<T>{form, {left + i * ar * ac, ar, ac, ac}, {right + i * br * bc, br, bc, bc}, M, N, K,
               to + i * M * N}
        .run(pool);
  }
}

ffi::Error matmul_call(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                       ffi::Result<ffi::AnyBuffer> c, int64_t form) {
  const auto of = c->element_type() == ffi::F32 ? multiply<float> : multiply<Half>;
  of(pool, static_cast<Form>(form), a, b, *c);
  return ffi::Error::Success();
}

// One matrix, its rows the shorter side, and the polynomial that is applied to it again and again.
class Iterate {
 public:
  static int64_t floats(int64_t n, int64_t m) {
    const int64_t N = round_up(n, kSide), M = round_up(m, kSide);
    return N * M * 5 / 2 + N * N * 3 + 256;
  }

  Iterate(Arena& arena, int64_t n, int64_t m)
      : N_(round_up(n, kSide)), M_(round_up(m, kSide)), x(arena.take(N_ * M_)) {
    rows_ = halves(arena, N_ * M_);
    across_ = halves(arena, N_ * M_);
    along_ = halves(arena, N_ * M_);
    gram_ = arena.take(N_ * N_);
    square_ = arena.take(N_ * N_);
    gram_rows_ = halves(arena, N_ * N_);
    gram_panels_ = halves(arena, N_ * N_);
    std::fill(x, x + N_ * M_, 0.0f);
  }

  // x <- a x + (b g + c g g) x with g = x x^T.
  void step(float a, float b, float c) {
    narrow_all(x, N_ * M_, rows_);
    const Matrix rows = {rows_, N_, M_, M_};
    for (int64_t p = 0; p < N_ / kSide; ++p) pack_panel_transposed(rows, p, across_ + p * kSide * M_);
    for (int64_t p = 0; p < M_ / kSide; ++p) pack_panel(rows, p, along_ + p * kSide * N_);
    symmetric(rows_, M_, across_, gram_);
    narrow_all(gram_, N_ * N_, gram_rows_);
    const Matrix gram = {gram_rows_, N_, N_, N_};
    for (int64_t p = 0; p < N_ / kSide; ++p) pack_panel(gram, p, gram_panels_ + p * kSide * N_);
    symmetric(gram_rows_, N_, gram_panels_, square_);
    for (int64_t i = 0; i < N_ * N_; i += kLanes) {
      store(square_ + i, b * load(gram_ + i) + c * load(square_ + i));
    }
    narrow_all(square_, N_ * N_, gram_rows_);
    alignas(64) float sums[kSide * kSide];
    for (int64_t p = 0; p < M_; p += kSide) {
      for (int64_t i = 0; i < N_; i += kSide) {
        block_product(N_ / kDepth, gram_rows_ + i * N_, N_, along_ + p * N_, sums, kSide);
        for (int64_t r = 0; r < kSide; ++r) {
          float* to = x + (i + r) * M_ + p;
          for (int64_t j = 0; j < kSide; j += kLanes) {
            store(to + j, a * load(to + j) + load(sums + r * kSide + j));
          }
        }
      }
    }
  }

  int64_t row() const { return M_; }

 private:
  // Products equal to their transposes: blocks above the diagonal, and mirrored.
  void symmetric(const Half* rows, int64_t depth, const Half* panels, float* to) const {
    for (int64_t p = 0; p < N_; p += kSide) {
      for (int64_t i = 0; i <= p; i += kSide) {
        block_product(depth / kDepth, rows + i * depth, depth, panels + p * depth, to + i * N_ + p,
                      N_);
        if (i < p) mirror(to + i * N_ + p, to + p * N_ + i);
      }
    }
  }

  void mirror(const float* from, float* to) const {
    for (int64_t i = 0; i < kSide; i += 16) {
      for (int64_t j = 0; j < kSide; j += 16) {
        __m512i rows[16];
        for (int r = 0; r < 16; ++r) rows[r] = _mm512_loadu_si512(from + (i + r) * N_ + j);
        transpose_words(rows);
        for (int r = 0; r < 16; ++r) _mm512_storeu_si512(to + (j + r) * N_ + i, rows[r]);
      }
    }
  }

  static void narrow_all(const float* from, int64_t count, Half* to) {
    for (int64_t i = 0; i < count; i += 16) narrow_16(from + i, 0xffff, to + i);
  }

  int64_t N_, M_;

 public:
  float* x;  // [n, m] in rows of `row()`

 private:
  Half *rows_, *across_, *along_, *gram_rows_, *gram_panels_;
  float *gram_, *square_;
};

void orthogonalize(const float* from, int64_t R, int64_t C, ffi::Span<const float> coefficients,
                   float eps, float* to) {
  const bool tall = R > C;
  const int64_t n = tall ? C : R, m = tall ? R : C;
  Arena& arena = Arena::of_this_thread();
  arena.start(Iterate::floats(n, m));
  Iterate iterate(arena, n, m);
  double squares = 0;
  for (int64_t i = 0; i < R; ++i) {
    float line = 0;
    for (int64_t j = 0; j < C; ++j) line += from[i * C + j] * from[i * C + j];
    squares += line;
  }
  const float scale = 1 / (static_cast<float>(std::sqrt(squares)) + eps);
  const int64_t row = iterate.row();
  const int64_t by_row = tall ? 1 : row, by_column = tall ? row : 1;
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < C; ++j) iterate.x[i * by_row + j * by_column] = from[i * C + j] * scale;
  }
  const Tiles tiles;
  for (size_t s = 0; s + 2 < coefficients.size(); s += 3) {
    iterate.step(coefficients[s], coefficients[s + 1], coefficients[s + 2]);
  }
  for (int64_t i = 0; i < R; ++i) {
    for (int64_t j = 0; j < C; ++j) to[i * C + j] = iterate.x[i * by_row + j * by_column];
  }
}

ffi::Error orthogonalize_call(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                              ffi::Result<ffi::Buffer<ffi::F32>> y,
                              ffi::Span<const float> coefficients, float eps) {
  const auto dims = x.dimensions();
  const int64_t rank = dims.size(), R = dims[rank - 2], C = dims[rank - 1];
  const int64_t batch = x.element_count() / (R * C);
  const float* from = x.typed_data();
  float* to = y->typed_data();
  parallel_for(pool, batch, [&](int64_t i) {
    orthogonalize(from + i * R * C, R, C, coefficients, eps, to + i * R * C);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_matmul, fornax::matmul_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("form"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_orthogonalize, fornax::orthogonalize_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<xla::ffi::Span<const float>>("coefficients")
                                  .Attr<float>("eps"));

#endif  // FORNAX_BFLOAT16_PRODUCTS
