// Vectors, small matrix products and a parallel loop: what the native CPU kernels share.
//
// Vectors are the compiler's own extension, so one source serves AVX-512, AVX2 and NEON.

#ifndef FORNAX_KERNELS_SIMD_H_
#define FORNAX_KERNELS_SIMD_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fornax {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline IntVec load(const int32_t* from) {
  IntVec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }  // 0 + x would be an addition, for the sake of -0
inline IntVec splat(int32_t x) { return IntVec{} + x; }

inline IntVec bits(Vec v) { return (IntVec)v; }
inline Vec from_bits(IntVec v) { return (Vec)v; }

// Lanes of `yes` where the mask is all ones, 0 elsewhere.
inline Vec where(IntVec mask, Vec yes) { return from_bits(bits(yes) & mask); }
inline Vec where(IntVec mask, Vec yes, Vec no) {
  return from_bits((bits(yes) & mask) | (bits(no) & ~mask));
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FORNAX_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(FORNAX_SHUFFLE)
#define FORNAX_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Lanes of a and b without the bit `step` in their number go to a, those with it to b.
template <int step, int... lane>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, lane...>) {
  const Vec kept = a;
  a = FORNAX_SHUFFLE(kept, b, (lane & step ? lane - step + kLanes : lane)...);
  b = FORNAX_SHUFFLE(kept, b, (lane & step ? lane + kLanes : lane + step)...);
}

// Rows of kLanes numbers become columns.
template <int step = 1>
inline void transpose(Vec (&v)[kLanes]) {
  if constexpr (step < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      exchange<step>(v[i], v[i + step], std::make_integer_sequence<int, kLanes>());
    }
    transpose<2 * step>(v);
  }
}

// Lanes 0 to `step` - 1 with those that are `step` further on.
template <int step, int... lane>
inline Vec further(Vec v, std::integer_sequence<int, lane...>) {
  return FORNAX_SHUFFLE(v, v, (lane ^ step)...);
}

// What `join` makes of all lanes, halves first.
template <int step = kLanes / 2, typename Join>
inline float fold(Vec v, Join join) {
  if constexpr (step == 0) {
    return v[0];
  } else {
    return fold<step / 2>(join(v, further<step>(v, std::make_integer_sequence<int, kLanes>())), join);
  }
}

inline float sum(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; });
}

inline float highest(Vec v) { return fold(v, maximum); }

// e^x to about 1 ulp for -87 < x < 88; clamped outside. x = n ln 2 + r, |r| <= ln 2 / 2, and a Taylor
// polynomial of degree 7 in r.
inline Vec exponential(Vec x) {
  x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + shift;
  const Vec n = shifted - shift;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntVec power = (bits(shifted) - bits(shift) + 127) << 23;
  return p * from_bits(power);
}

inline Vec hyperbolic_tangent(Vec x) {
  return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}

// Zeros, vector by vector: of an empty initializer GCC makes a loop of bytes in memory.
template <int kRows, int kVecs>
inline void clear(Vec (&acc)[kRows][kVecs]) {
  for (auto& row : acc) {
    for (Vec& v : row) v = Vec{};
  }
}

// A matrix seen through two strides; element (i, j) is at[i * row + j * column].
struct View {
  const float* at;
  int64_t row;
  int64_t column;
};

template <int kRows, int kVecs>
inline void tile(int64_t depth, View a, const float* b, int64_t b_row, float* c, int64_t c_row,
                 bool add) {
  Vec acc[kRows][kVecs];
  clear(acc);
  for (int64_t k = 0; k < depth; ++k) {
    Vec line[kVecs];
    for (int j = 0; j < kVecs; ++j) line[j] = load(b + k * b_row + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec x = splat(a.at[i * a.row + k * a.column]);
      for (int j = 0; j < kVecs; ++j) acc[i][j] += x * line[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      float* to = c + i * c_row + j * kLanes;
      store(to, add ? load(to) + acc[i][j] : acc[i][j]);
    }
  }
}

template <int kVecs>
inline void panel(int64_t rows, int64_t depth, View a, const float* b, int64_t b_row, float* c,
                  int64_t c_row, bool add) {
  // As many sums as units for multiplication have steps, with room for a few: with AVX2 six rows of two
  // vectors keep them busy and four do not.
  constexpr int kRows = kLanes >= 16 ? 4 : 6, kFew = 4;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    tile<kRows, kVecs>(depth, {a.at + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row,
                       add);
  }
  for (; i + kFew <= rows; i += kFew) {
    tile<kFew, kVecs>(depth, {a.at + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row,
                      add);
  }
  for (; i < rows; ++i) {
    tile<1, kVecs>(depth, {a.at + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row, add);
  }
}

// c[rows, columns] = (add ? c : 0) + a[rows, depth] b[depth, columns]; columns is a multiple of
// kLanes, and the rows of b and c are contiguous.
inline void product(int64_t rows, int64_t columns, int64_t depth, View a, const float* b,
                    int64_t b_row, float* c, int64_t c_row, bool add) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWide * kLanes <= columns; j += kWide * kLanes) {
    panel<kWide>(rows, depth, a, b + j, b_row, c + j, c_row, add);
  }
  for (; j < columns; j += kLanes) panel<1>(rows, depth, a, b + j, b_row, c + j, c_row, add);
}

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// bfloat16 as it lies in memory.
struct Half {
  uint16_t raw;
};

inline float widen(float x) { return x; }
inline float widen(Half x) {
  const uint32_t wide = static_cast<uint32_t>(x.raw) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Half* to) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const bool nan = (wide & 0x7fffffff) > 0x7f800000;
  to->raw = nan ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// A matrix as it lies in memory; `transposed` if its rows are the columns of the product's operand.
template <typename T>
struct Operand {
  const T* at;
  int64_t row;
  bool transposed;

  // Element (i, j) of the operand, which is what it is for transposed or not.
  const T* element(int64_t i, int64_t j) const {
    return transposed ? at + j * row + i : at + i * row + j;
  }
};

// kLanes numbers as float32, and back.
inline Vec load_wide(const float* from) { return load(from); }
inline Vec load_wide(const Half* from) {
#if defined(__AVX512F__)  // of a conversion by the compiler's own vectors GCC makes two, and joins them
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return from_bits((IntVec)_mm512_cvtepu16_epi32(narrow) << 16);
#else
  typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
  HalfVec narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return from_bits(__builtin_convertvector(narrow, IntVec) << 16);
#endif
}

inline void store_narrow(float* to, Vec v) { store(to, v); }
inline void store_narrow(Half* to, Vec v) {
  typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
  typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
  const Bits wide = (Bits)v, nan = (Bits)(v != v);
  const Bits near = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  const HalfVec narrow = __builtin_convertvector((near & ~nan) | (nan & 0x7fc0), HalfVec);
  std::memcpy(to, &narrow, sizeof narrow);
}

// Working memory of one thread that outlives the call: no page is faulted in twice.
class Arena {
 public:
  static Arena& of_this_thread() {
    static thread_local Arena arena;
    return arena;
  }
  // Forgets what was taken and makes room for `floats` more.
  void start(int64_t floats) {
    used_ = 0;
    if (static_cast<int64_t>(room_.size()) < floats + 16) room_.resize(floats + 16);
    const auto address = reinterpret_cast<uintptr_t>(room_.data());
    base_ = room_.data() + ((64 - address % 64) % 64) / 4;
  }
  float* take(int64_t floats) {
    float* taken = base_ + used_;
    used_ += floats;
    return taken;
  }

 private:
  std::vector<float> room_;
  float* base_ = nullptr;
  int64_t used_ = 0;
};

// Runs work(0) .. work(count - 1) on the pool and the calling thread; returns when all are done. The
// caller never waits for a task that has not begun, so a busy pool cannot deadlock it.
template <typename Work>
void parallel_for(ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto state = std::make_shared<State>();
  const Work* body = &work;  // touched only while an index is left, so while the caller waits
  auto loop = [state, count, body] {
    for (int64_t i = state->next++; i < count; i = state->next++) {
      (*body)(i);
      if (++state->done == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->finished.notify_all();
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop(); });
  loop();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done == count; });
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_SIMD_H_
