// The codes of a cache in 8 bits: how they are read, and how keys and values become codes.
//
// A vector is one key or one value of a token. Its scale is its largest magnitude over that of the
// largest code; a code stands for code * scale. Attention multiplies with codes, and scores and
// weights with scales: so a code costs what a bfloat16 costs once it is in a register.

#ifndef FORNAX_KERNELS_PAGED_CODES_H_
#define FORNAX_KERNELS_PAGED_CODES_H_

#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "paged_block.h"

namespace fornax {
namespace {

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

// Integers from -127 to 127.
struct Int8 {
  static constexpr float kLargest = 127;
  static constexpr float kUnit = 1;  // what a code stands for, over what it widens to
  int8_t raw;
};

// e4m3. Its bits are those of a float16 of which 2^8 as much is meant, denormals included.
struct Float8 {
  static constexpr float kLargest = 448;
  static constexpr float kUnit = 256;
  uint8_t raw;
};

// Whether a cache of T holds codes.
template <typename T>
constexpr bool kCodes = std::is_same_v<T, Int8> || std::is_same_v<T, Float8>;

inline IntVec load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
#endif
}

using fornax::load_wide;
inline Vec load_wide(const Int8* from) { return __builtin_convertvector(load_bytes(from), Vec); }

inline Vec load_wide(const Float8* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(0xbf80 - 0x10000)));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return (Vec)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(0xbf80 - 0x10000)));
#else
  const IntVec raw = load_bytes(from), magnitude = raw & 0x7f;
  const Vec small = __builtin_convertvector(magnitude, Vec) * 0x1p-17f;
  const IntVec large = (magnitude << 20) + (112 << 23);
  const IntVec value = bits(where(magnitude < 8, small, from_bits(large)));
  return from_bits(value | (raw & splat(std::numeric_limits<int32_t>::min())));
#endif
}

using fornax::widen;  // of float and Half, beside these
inline float widen(Int8 x) { return x.raw; }
inline float widen(Float8 x) {
  Float8 all[kLanes] = {x};
  return load_wide(all)[0];
}

// The nearest integers, ties to even. Conversions, since a sum that rounds would be contracted with
// the product before it, which must be rounded by itself.
inline IntVec nearest(Vec x) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
  return (IntVec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (IntVec)_mm_cvtps_epi32((__m128)x);
#else
  IntVec found;
  for (int i = 0; i < kLanes; ++i) found[i] = static_cast<int32_t>(std::nearbyint(x[i]));
  return found;
#endif
}

// The nearest codes, ties to even, of numbers up to kLargest in magnitude.
inline IntVec round_to(Vec x, Int8) { return nearest(x); }
inline IntVec round_to(Vec x, Float8) {
  const IntVec sign = bits(x) & splat(std::numeric_limits<int32_t>::min());
  const Vec magnitude = from_bits(bits(x) & 0x7fffffff);
  const IntVec raw = bits(magnitude);
  const IntVec large = ((raw + 0x7ffff + ((raw >> 20) & 1)) >> 20) - (120 << 3);
  const IntVec small = nearest(magnitude * 512.0f);  // steps of 2^-9
  const IntVec below = magnitude < splat(0x1p-6f);
  return (small & below) | (large & ~below) | ((sign >> 24) & 0x80);
}

// `count` numbers at most, zeros in place of the others.
template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load_wide(from);
  float some[kLanes] = {};
  for (int64_t j = 0; j < count; ++j) some[j] = widen(from[j]);
  return load(some);
}

// Writes a vector's codes and returns its scale: 0 where a float below 2^-126 would be needed, NaN
// where a number of the vector is not finite; codes are 0 then.
template <typename Code, typename From>
inline float encode(const From* from, int64_t width, Code* to) {
  Vec top = {}, poison = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec x = load_some(from + j, width - j);
    top = maximum(top, maximum(x, -x));
    poison += x * 0.0f;
  }
  const float scale = highest(top) * (1.0f / Code::kLargest) + sum(poison);
  const bool usable = scale >= std::numeric_limits<float>::min();
  const Vec inverse = splat(1 / scale);
  for (int64_t j = 0; j < width; j += kLanes) {
    const int64_t count = std::min<int64_t>(width - j, kLanes);
    const Vec x = usable ? load_some(from + j, count) * inverse : Vec{};
    const ByteVec codes = __builtin_convertvector(round_to(x, Code{}), ByteVec);
    std::memcpy(to + j, &codes, count);
  }
  return usable || std::isnan(scale) ? scale : 0.0f;
}

}  // namespace
}  // namespace fornax

#endif  // FORNAX_KERNELS_PAGED_CODES_H_
