// From logits to a token: what min-p, top-k and top-p keep of a row, and the draw among that.
//
// A filter keeps what is at least some logit: equal ones stay or go together. That logit is found by
// bisection until few values are left to sort. A row is one thread's work, in one order, so its result
// does not depend on the rows beside it.
//
// Letters: M rows, V vocabulary.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "crew.h"

namespace fornax {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

constexpr int64_t kWide = 256;             // token t is in lane t % kWide of the draw
constexpr int64_t kBlock = 4 * kLanes;     // values that a loop takes at once
constexpr int64_t kPart = 2048;            // weights whose sum is float32
constexpr int64_t kFew = 128;              // values that are sorted
constexpr int64_t kShared = 16 * 1024;     // logits that are worth a second thread
constexpr float kDeepest = 87.0f;          // (top - logit) / temperature of the last weight above 0
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

inline bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
#endif
}

struct Filters {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
};

// How one row is drawn.
struct Choice {
  float temperature;
  int64_t top_k;
  float top_p, min_p;

  Choice(const Filters& of, int64_t row, int64_t V)
      : temperature(of.temperature[row]),
        top_k(std::clamp<int64_t>(of.top_k[row], 1, V)),
        top_p(of.top_p[row]),
        min_p(of.min_p[row]),
        all_(V) {}

  bool greedy() const { return !(temperature > 0); }
  bool counts() const { return top_k < all_; }
  bool cuts() const { return counts() || top_p < 1 || min_p > 0; }

 private:
  int64_t all_;
};

// Values to choose among, filled up to whole blocks with -inf.
struct Values {
  const float* x;
  int64_t count;
  float top;   // the highest of the row
  float rate;  // 1 / temperature

  // e^((x - top) / temperature)
  Vec weight(Vec v) const {
    const Vec depth = (top - v) * rate;
    return where(depth <= kDeepest, exponential(-depth));
  }
};

struct Reach {
  double amount;
  int64_t count;
};

// How many values there are from `low` upwards, and the sum of their weights, or the number again.
template <bool kWeighted>
Reach reach(const Values& of, const float* weights, float low) {
  Reach found = {0, 0};
  for (int64_t start = 0; start < of.count; start += kPart) {
    Vec amounts[4] = {};
    IntVec counts[4] = {};
    for (int64_t j = start; j < std::min(start + kPart, of.count); j += kBlock) {
      for (int i = 0; i < 4; ++i) {
        const IntVec mask = load(of.x + j + i * kLanes) >= low;
        counts[i] -= mask;
        if (kWeighted) amounts[i] += where(mask, load(weights + j + i * kLanes));
      }
    }
    const IntVec count = (counts[0] + counts[1]) + (counts[2] + counts[3]);
    for (int i = 0; i < kLanes; ++i) found.count += count[i];
    if (kWeighted) found.amount += sum((amounts[0] + amounts[1]) + (amounts[2] + amounts[3]));
  }
  if (!kWeighted) found.amount = static_cast<double>(found.count);
  return found;
}

// Copies the values in [low, high) and returns how many; there must be room for one more.
int64_t collect(const Values& of, float low, float high, float* to) {
  int64_t found = 0;
  for (int64_t j = 0; j < of.count; j += kLanes) {
    const Vec v = load(of.x + j);
    if (!any((v >= low) & (v < high))) continue;
    for (int64_t i = j; i < j + kLanes; ++i) {
      to[found] = of.x[i];
      found += (of.x[i] >= low) & (of.x[i] < high);
    }
  }
  return found;
}

// The highest value from which upwards the amounts reach the goal; from `low` upwards they do.
template <bool kWeighted>
float limit(const Values& of, const float* weights, double goal, float low) {
  float high = of.top;
  Reach above = reach<kWeighted>(of, weights, high);
  if (above.amount >= goal) return high;
  Reach below = reach<kWeighted>(of, weights, low);
  while (below.count - above.count > kFew) {
    const float middle = 0.5f * low + 0.5f * high;
    if (!(middle > low && middle < high)) return low;  // all that is left is equal
    const Reach found = reach<kWeighted>(of, weights, middle);
    if (found.amount >= goal) {
      low = middle, below = found;
    } else {
      high = middle, above = found;
    }
  }
  float left[kFew + kLanes], amounts[kFew + kLanes];
  const int64_t count = collect(of, low, high, left);
  std::sort(left, left + count, std::greater<float>());
  std::fill(left + count, left + round_up(count, kLanes), kForbidden);
  for (int64_t j = 0; j < count; j += kLanes) {
    store(amounts + j, kWeighted ? of.weight(load(left + j)) : splat(1.0f));
  }
  double amount = above.amount;
  for (int64_t i = 0; i < count; ++i) {
    amount += amounts[i];
    if (amount >= goal) return left[i];
  }
  return count > 0 ? left[count - 1] : high;  // short of the goal by rounding
}

// A value that at least k values reach: the k-th highest of the lanes' highest ones.
float reached(const Values& row, int64_t k) {
  if (k > kWide) return kForbidden;
  float best[kWide];
  std::fill(best, best + kWide, kForbidden);
  for (int64_t start = 0; start < row.count; start += kWide) {
    for (int64_t j = 0; j < kWide; j += kLanes) {
      store(best + j, maximum(load(row.x + start + j), load(best + j)));
    }
  }
  std::nth_element(best, best + k - 1, best + kWide, std::greater<float>());
  return best[k - 1];
}

// The least logit of the row that the filters keep: min-p first, then top-k, then top-p. `room`
// holds twice the row and a block.
float least_kept(const Values& row, const Choice& choice, float* room) {
  if (!choice.cuts()) return kForbidden;
  const auto at_depth = [&](double depth) {
    const double least = row.top - depth * choice.temperature;
    return static_cast<float>(std::max<double>(least, -FLT_MAX));
  };
  float low = at_depth(kDeepest);
  if (choice.min_p > 0) low = std::max(low, at_depth(-std::log(double{choice.min_p})));
  if (choice.counts()) {
    low = std::max(low, reached(row, choice.top_k));
    if (reach<false>(row, nullptr, low).count > choice.top_k) {
      low = limit<false>(row, nullptr, static_cast<double>(choice.top_k), low);
    }
  }
  if (!(choice.top_p < 1)) return low;
  Values left = row;
  if (choice.counts() || choice.min_p > 0) {
    const int64_t count = collect(row, low, std::numeric_limits<float>::infinity(), room);
    left.x = room;
    left.count = round_up(count, kBlock);
    std::fill(room + count, room + left.count, kForbidden);
  }
  float* weights = room + row.count + kBlock;
  for (int64_t j = 0; j < left.count; j += kLanes) {
    store(weights + j, left.weight(load(left.x + j)));
  }
  const double total = reach<true>(left, weights, kForbidden).amount;
  // All tokens below this weight together have less than what top-p leaves out.
  const double spare = (1.0 - choice.top_p) * total / static_cast<double>(left.count);
  low = std::max(low, at_depth(-std::log(spare)));
  return limit<true>(left, weights, double{choice.top_p} * total, low);
}

// The first index at which running sums pass that share of the total, never one of weight 0.
int64_t pick(const float* weights, int64_t count, float share) {
  float total = 0, sum = 0;
  for (int64_t i = 0; i < count; ++i) total += weights[i];
  const float target = share * total;
  for (int64_t i = 0; i < count; ++i) {
    sum += weights[i];
    if (sum > target && weights[i] > 0) return i;
  }
  return std::max_element(weights, weights + count) - weights;
}

// First a lane, by the lanes' sums, then a token of it, as XLA's way does. `column` has room for a
// value of each group of lanes, in whole vectors.
int64_t draw(const Values& row, float low, const float* shares, float* column) {
  float lanes[kWide] = {};
  for (int64_t start = 0; start < row.count; start += kWide) {
    for (int64_t j = 0; j < kWide; j += kLanes) {
      const Vec v = load(row.x + start + j);
      const IntVec kept = v >= low;
      if (any(kept)) store(lanes + j, load(lanes + j) + where(kept, row.weight(v)));
    }
  }
  const int64_t lane = pick(lanes, kWide, shares[0]), groups = row.count / kWide;
  for (int64_t g = 0; g < groups; ++g) column[g] = row.x[g * kWide + lane];
  std::fill(column + groups, column + round_up(groups, kLanes), kForbidden);
  for (int64_t g = 0; g < groups; g += kLanes) {
    const Vec v = load(column + g);
    store(column + g, where(v >= low, row.weight(v)));
  }
  return pick(column, groups, shares[1]) * kWide + lane;
}

// The row's highest value; NaN where one is NaN.
float highest_of(const float* line, int64_t width) {
  Vec top[4];
  for (Vec& v : top) v = splat(kForbidden);
  IntVec unordered = {};
  for (int64_t j = 0; j < width; j += kBlock) {
    for (int i = 0; i < 4; ++i) {
      const Vec v = load(line + j + i * kLanes);
      unordered |= v != v;
      top[i] = maximum(v, top[i]);
    }
  }
  if (any(unordered)) return std::numeric_limits<float>::quiet_NaN();
  return highest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
}

// Calls work(row, values, choice, room) for each row.
template <typename Work>
void for_rows(ffi::ThreadPool& pool, const Floats& logits, const Filters& filters,
              const Work& work) {
  const int64_t M = logits.dimensions()[0], V = logits.dimensions()[1];
  const int64_t width = round_up(V, kWide);
  const int64_t parts =
      M * V <= kShared ? 1 : std::min<int64_t>(M, 4 * std::max<int64_t>(pool.num_threads(), 1));
  share_rows(pool, M, parts, [&](int64_t part) {
    Arena& arena = Arena::of_this_thread();
    arena.start(3 * width + kBlock);
    float* line = arena.take(width);
    float* room = arena.take(2 * width + kBlock);
    for (int64_t i = M * part / parts; i < M * (part + 1) / parts; ++i) {
      const Choice choice(filters, i, V);
      std::copy_n(logits.typed_data() + i * V, V, line);
      std::fill(line + V, line + width, kForbidden);
      const float rate = 1 / std::max(choice.temperature, FLT_MIN);
      work(i, Values{line, width, highest_of(line, width), rate}, choice, room);
    }
  });
}

ffi::Error filter_logits_call(ffi::ThreadPool pool, Floats logits, Floats temperature, Ints top_k,
                              Floats top_p, Floats min_p, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t V = logits.dimensions()[1];
  const Filters filters = {temperature.typed_data(), top_k.typed_data(), top_p.typed_data(),
                           min_p.typed_data()};
  for_rows(pool, logits, filters,
           [&](int64_t i, const Values& row, const Choice& choice, float* room) {
             float* to = y->typed_data() + i * V;
             const bool whole = choice.greedy() || !std::isfinite(row.top);
             const float low = whole ? kForbidden : least_kept(row, choice, room);
             for (int64_t j = 0; j < V; ++j) to[j] = row.x[j] < low ? kForbidden : row.x[j];
           });
  return ffi::Error::Success();
}

ffi::Error sample_tokens_call(ffi::ThreadPool pool, Floats logits, Floats uniforms,
                              Floats temperature, Ints top_k, Floats top_p, Floats min_p,
                              ffi::ResultBuffer<ffi::S32> tokens) {
  const int64_t V = logits.dimensions()[1];
  const Filters filters = {temperature.typed_data(), top_k.typed_data(), top_p.typed_data(),
                           min_p.typed_data()};
  for_rows(pool, logits, filters,
           [&](int64_t i, const Values& row, const Choice& choice, float* room) {
             int64_t token = -1;
             if (std::isfinite(row.top) && choice.greedy()) {
               token = std::find(row.x, row.x + V, row.top) - row.x;
             } else if (std::isfinite(row.top)) {
               const float low = least_kept(row, choice, room);
               token = draw(row, low, uniforms.typed_data() + 2 * i, room);
             }
             tokens->typed_data()[i] = static_cast<int32_t>(token);
           });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_filter_logits, fornax::filter_logits_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_sample_tokens, fornax::sample_tokens_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
