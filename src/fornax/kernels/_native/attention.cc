// Attention on CPU, forward and backward, a block of queries against a block of keys at a time.
//
// The algorithm is flash attention's (Dao 2023): a running maximum and sum per query forward; the
// log-sum-exp saved; scores computed again backward. Blocks in which no query sees a key are skipped.
//
// All is computed in float32. What queries are multiplied with keys for, and slopes of the output with
// values, is exact either way where those are bfloat16, so processors that multiply bfloat16 do.
//
// Letters: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, H key width,
// W value width. q [B, T, N, H], k [B, S, K, H], v [B, S, K, W], o [B, T, N, W], lse [B, N, T].

#include <algorithm>
#include <cmath>
#include <limits>

#include "bfloat16_product.h"
#include "simd.h"

namespace fornax {
namespace {

constexpr int64_t kBlock = 64;  // queries and keys of a block
constexpr float kLowest = -1e30f;
constexpr int32_t kNoKey = std::numeric_limits<int32_t>::min();
constexpr int32_t kNoQuery = kNoKey + 1;

struct Shape {
  int64_t B, T, S, N, K, H, W;
  int64_t group() const { return N / K; }
  int64_t queries() const { return round_up(T, kBlock); }
  int64_t keys() const { return round_up(S, kBlock); }
  int64_t key_width() const { return round_up(H, kLanes); }
  int64_t value_width() const { return round_up(W, kLanes); }
};

struct Options {
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
  bool causal;
};

struct Span {
  int32_t low, high;
  void include(int32_t x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
};

const Span kEmpty = {std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};

// Positions and documents of one row of queries or keys, padded to whole blocks.
struct Tokens {
  const int32_t* position;
  const int32_t* segment;  // padding carries `nobody`, which equals nothing on the other side
};

// What a block of tokens covers; `whole` if it holds no padding.
struct Block {
  Span position = kEmpty;
  Span segment = kEmpty;
  bool whole = true;
  Block(const Tokens& tokens, int64_t start, int32_t nobody) {
    for (int64_t i = start; i < start + kBlock; ++i) {
      if (tokens.segment[i] == nobody) {
        whole = false;
        continue;
      }
      position.include(tokens.position[i]);
      segment.include(tokens.segment[i]);
    }
  }
  bool empty() const { return segment.low > segment.high; }
};

enum class Sight { kNone, kSome, kAll };

Sight sight(const Block& q, const Block& k, const Options& options) {
  if (q.empty() || k.empty()) return Sight::kNone;
  if (q.segment.high < k.segment.low || k.segment.high < q.segment.low) return Sight::kNone;
  const int64_t nearest = static_cast<int64_t>(q.position.low) - k.position.high;
  const int64_t farthest = static_cast<int64_t>(q.position.high) - k.position.low;
  if (options.causal && farthest < 0) return Sight::kNone;
  if (options.window && (nearest >= options.window || -farthest >= options.window)) {
    return Sight::kNone;
  }
  const bool one = q.whole && k.whole && q.segment.low == q.segment.high &&
                   k.segment.low == k.segment.high && q.segment.low == k.segment.low;
  const bool ordered = !options.causal || nearest >= 0;
  const bool near = !options.window || (farthest < options.window && -nearest < options.window);
  return one && ordered && near ? Sight::kAll : Sight::kSome;
}

// All ones in the lanes of the keys that a query sees.
inline IntVec seen(int32_t position, int32_t segment, const Tokens& keys, int64_t at,
                   const Options& options) {
  IntVec mask = load(keys.segment + at) == splat(segment);
  const IntVec distance = splat(position) - load(keys.position + at);
  if (options.causal) mask &= distance >= 0;
  if (options.window) {
    const int32_t window = static_cast<int32_t>(std::min<int64_t>(options.window, INT32_MAX));
    mask &= distance < window;
    mask &= distance > -window;
  }
  return mask;
}

// Copies a [rows, width] slice whose rows are `stride` apart into padded rows of floats.
template <typename T>
void gather(const T* from, int64_t rows, int64_t width, int64_t stride, float factor, float* to,
            int64_t padded_rows, int64_t padded_width) {
  for (int64_t i = 0; i < rows; ++i) {
    float* line = to + i * padded_width;
    for (int64_t j = 0; j < width; ++j) line[j] = widen(from[i * stride + j]) * factor;
    for (int64_t j = width; j < padded_width; ++j) line[j] = 0;
  }
  std::fill(to + rows * padded_width, to + padded_rows * padded_width, 0.0f);
}

template <typename T>
void scatter(const float* from, int64_t rows, int64_t width, int64_t padded_width, float factor,
             T* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      narrow(from[i * padded_width + j] * factor, to + i * stride + j);
    }
  }
}

// to[rows / kBlock, width, kBlock] = from[rows, width], each block of keys transposed on its own: rows
// as far apart as all keys would share few sets of the first cache.
void transpose_blocks(const float* from, int64_t rows, int64_t width, float* to) {
  for (int64_t start = 0; start < rows; start += kBlock, from += kBlock * width, to += kBlock * width) {
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      for (int64_t j = 0; j < width; j += kLanes) {
        Vec square[kLanes];
        for (int64_t k = 0; k < kLanes; ++k) square[k] = load(from + (i + k) * width + j);
        transpose(square);
        for (int64_t k = 0; k < kLanes; ++k) store(to + (j + k) * kBlock + i, square[k]);
      }
    }
  }
}

void gather_tokens(const int32_t* position, const int32_t* segment, int64_t count, int64_t padded,
                   int32_t nobody, int32_t* positions, int32_t* segments) {
  for (int64_t i = 0; i < count; ++i) {
    positions[i] = position[i];
    segments[i] = segment[i] == 0 ? nobody : segment[i];
  }
  for (int64_t i = count; i < padded; ++i) {
    positions[i] = 0;
    segments[i] = nobody;
  }
}

// c[rows, kBlock] = x y^T, x a block of rows on the queries' side and y one of keys or values: as floats,
// y transposed.
template <typename T>
struct RowProduct {
  static constexpr bool kWide = true;

  // Floats that a row of either takes.
  static int64_t row(int64_t width) { return round_up(width, kLanes); }

  // x as it is multiplied, of what `gather` made of the rows.
  static const float* left(const T*, int64_t, int64_t, int64_t, const float* wide, float*) {
    return wide;
  }

  static void right(const T*, int64_t, int64_t width, int64_t, const float* wide, int64_t padded,
                    float* y) {
    transpose_blocks(wide, padded, row(width), y);
  }

  static void run(int64_t rows, int64_t width, const float* x, const float* y, float* c) {
    product(rows, kBlock, row(width), {x, row(width), 1}, y, kBlock, c, kBlock, false);
  }
};

#if defined(FORNAX_BFLOAT16_PRODUCTS)
// As bfloat16, without a factor.
template <>
struct RowProduct<Half> {
  static constexpr bool kWide = false;

  static int64_t row(int64_t width) { return tiles_of(width) * kDepth / 2; }

  static const float* left(const Half* from, int64_t rows, int64_t width, int64_t stride,
                           const float*, float* x) {
    for (int64_t i = 0; i < blocks_of(rows); ++i) {
      pack_rows({from, rows, width, stride}, i, reinterpret_cast<Half*>(x + i * kSide * row(width)));
    }
    return x;
  }

  static void right(const Half* from, int64_t rows, int64_t width, int64_t stride, const float*,
                    int64_t padded, float* y) {
    for (int64_t i = 0; i < padded / kSide; ++i) {
      pack_panel_transposed({from, rows, width, stride}, i,
                            reinterpret_cast<Half*>(y + i * kSide * row(width)));
    }
  }

  static void run(int64_t rows, int64_t width, const float* x, const float* y, float* c) {
    const auto *a = reinterpret_cast<const Half*>(x), *b = reinterpret_cast<const Half*>(y);
    const int64_t tiles = tiles_of(width), halves = tiles * kDepth;
    for (int64_t i = 0; i < rows; i += kSide) {
      for (int64_t j = 0; j < kBlock; j += kSide) {
        block_product(tiles, a + i * halves, halves, b + j * halves, c + i * kBlock + j, kBlock,
                      rows - i);
      }
    }
  }
};
#else
struct Tiles {};
#endif

// Everything about one row of the batch and one key/value head, in working memory.
template <typename T>
struct Head {
  using Rows = RowProduct<T>;

  float *k, *kt, *v, *vt;  // forward has no vt; k and v where they are multiplied as floats
  Tokens queries, keys;
  std::vector<Block> query_blocks, key_blocks;

  static int64_t floats(const Shape& s) {
    const int64_t wide = s.key_width() + s.value_width();
    return s.keys() * (wide + Rows::row(s.H) + Rows::row(s.W)) + 2 * (s.queries() + s.keys());
  }

  Head(Arena& arena, const Shape& s, const T* k_all, const T* v_all, const int32_t* position_q,
       const int32_t* position_k, const int32_t* segment_q, const int32_t* segment_k, int64_t b,
       int64_t head, bool backward) {
    const int64_t S = s.keys(), H = s.key_width(), W = s.value_width();
    k = arena.take(S * H);
    kt = arena.take(S * Rows::row(s.H));
    v = arena.take(S * W);
    vt = arena.take(S * Rows::row(s.W));
    auto* ints = reinterpret_cast<int32_t*>(arena.take(2 * (s.queries() + S)));
    const T* keys_of = k_all + (b * s.S * s.K + head) * s.H;
    const T* values_of = v_all + (b * s.S * s.K + head) * s.W;
    if (Rows::kWide || backward) gather(keys_of, s.S, s.H, s.K * s.H, 1.0f, k, S, H);
    if (Rows::kWide || !backward) gather(values_of, s.S, s.W, s.K * s.W, 1.0f, v, S, W);
    Rows::right(keys_of, s.S, s.H, s.K * s.H, k, S, kt);
    if (backward) Rows::right(values_of, s.S, s.W, s.K * s.W, v, S, vt);
    int32_t *pq = ints, *sq = pq + s.queries(), *pk = sq + s.queries(), *sk = pk + S;
    gather_tokens(position_q + b * s.T, segment_q + b * s.T, s.T, s.queries(), kNoQuery, pq, sq);
    gather_tokens(position_k + b * s.S, segment_k + b * s.S, s.S, S, kNoKey, pk, sk);
    queries = {pq, sq};
    keys = {pk, sk};
    for (int64_t i = 0; i < s.queries(); i += kBlock) query_blocks.emplace_back(queries, i, kNoQuery);
    for (int64_t i = 0; i < S; i += kBlock) key_blocks.emplace_back(keys, i, kNoKey);
  }
};

// One block's scores after softcap, keys that are not seen at kLowest.
template <typename T>
void score(const Head<T>& head, const Shape& s, const Options& options, const float* q,
           int64_t query, int64_t key, int64_t rows, Sight how, float* scores) {
  using Rows = RowProduct<T>;
  Rows::run(rows, s.H, q, head.kt + key * Rows::row(s.H), scores);
  if (Rows::kWide && options.softcap == 0 && how == Sight::kAll) return;
  const float cap = options.softcap, scale = Rows::kWide ? 1.0f : options.scale;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      float* at = scores + i * kBlock + j;
      Vec x = load(at) * scale;
      if (cap != 0) x = cap * hyperbolic_tangent(x / cap);
      if (how == Sight::kSome) {
        x = where(seen(head.queries.position[query + i], head.queries.segment[query + i], head.keys,
                       key + j, options),
                  x, splat(kLowest));
      }
      store(at, x);
    }
  }
}

// e^(score - maximum), 0 for keys that are not seen.
inline Vec weight(Vec x, Vec top) { return where(x > kLowest, exponential(x - top)); }

template <typename T>
struct Forward {
  using Rows = RowProduct<T>;

  Shape s;
  Options options;
  const T *q, *k, *v;
  const int32_t *position_q, *position_k, *segment_q, *segment_k;
  const float* sinks;  // null: none
  T* o;
  float* lse;

  void block(const Head<T>& head, int64_t b, int64_t n, int64_t index, float* q_block,
             float* scores, float* out) const {
    const int64_t W = s.value_width(), query = index * kBlock;
    const int64_t rows = std::min(kBlock, s.T - query);
    const T* from = q + ((b * s.T + query) * s.N + n) * s.H;
    if (Rows::kWide) {
      gather(from, rows, s.H, s.N * s.H, options.scale, q_block, rows, s.key_width());
    }
    const float* x = Rows::left(from, rows, s.H, s.N * s.H, q_block, q_block);
    float top[kBlock];
    Vec total[kBlock];  // its lanes' sum
    std::fill(top, top + kBlock, sinks ? sinks[n] : kLowest);
    std::fill(total, total + kBlock, Vec{sinks ? 1.0f : 0.0f});
    std::fill(out, out + kBlock * W, 0.0f);
    for (size_t other = 0; other < head.key_blocks.size(); ++other) {
      const Sight how = sight(head.query_blocks[index], head.key_blocks[other], options);
      if (how == Sight::kNone) continue;
      const int64_t key = other * kBlock;
      score(head, s, options, x, query, key, rows, how, scores);
      for (int64_t i = 0; i < rows; ++i) soften(scores + i * kBlock, out + i * W, top + i, total + i);
      product(rows, W, kBlock, {scores, kBlock, 1}, head.v + key * W, W, out, W, true);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const float all = sum(total[i]), inverse = all == 0 ? 0 : 1 / all;
      T* to = o + ((b * s.T + query + i) * s.N + n) * s.W;
      for (int64_t j = 0; j < s.W; ++j) narrow(out[i * W + j] * inverse, to + j);
      lse[(b * s.N + n) * s.T + query + i] = all == 0 ? 0 : top[i] + std::log(all);
    }
  }

  // Scores of one query become weights; what it gathered so far is rescaled to the new maximum.
  void soften(float* scores, float* out, float* top, Vec* total) const {
    Vec most = splat(kLowest);
    for (int64_t j = 0; j < kBlock; j += kLanes) most = maximum(most, load(scores + j));
    const float now = std::max(*top, highest(most));
    const Vec now_v = splat(now);
    Vec added = splat(0.0f);
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      const Vec w = weight(load(scores + j), now_v);
      store(scores + j, w);
      added += w;
    }
    if (now != *top) {
      const float shrink = std::exp(*top - now);
      const int64_t W = s.value_width();
      for (int64_t j = 0; j < W; j += kLanes) store(out + j, load(out + j) * shrink);
      *total *= shrink;
      *top = now;
    }
    *total += added;
  }

  void run(ffi::ThreadPool& pool) const {
    const int64_t blocks = s.queries() / kBlock;
    const int64_t heads = s.B * s.K;
    const int64_t wanted = (2 * pool.num_threads() + heads - 1) / std::max<int64_t>(heads, 1);
    const int64_t parts = std::max<int64_t>(1, std::min(blocks, wanted));
    parallel_for(pool, heads * parts, [&](int64_t task) {
      const int64_t b = task / parts / s.K, kv = task / parts % s.K, part = task % parts;
      Arena& arena = Arena::of_this_thread();
      [[maybe_unused]] const Tiles tiles;
      arena.start(Head<T>::floats(s) + kBlock * (Rows::row(s.H) + kBlock + s.value_width()));
      const Head<T> head(arena, s, k, v, position_q, position_k, segment_q, segment_k, b, kv, false);
      float* q_block = arena.take(kBlock * Rows::row(s.H));
      float* scores = arena.take(kBlock * kBlock);
      float* out = arena.take(kBlock * s.value_width());
      for (int64_t n = kv * s.group(); n < (kv + 1) * s.group(); ++n) {
        for (int64_t i = part; i < blocks; i += parts) {
          block(head, b, n, i, q_block, scores, out);
        }
      }
    });
  }
};

template <typename T>
struct Backward {
  using Rows = RowProduct<T>;

  Shape s;
  Options options;
  const T *q, *k, *v;
  const int32_t *position_q, *position_k, *segment_q, *segment_k;
  const float* lse;
  const T *o, *d_o;
  T *dq, *dk, *dv;

  struct Scratch {
    float *q, *d_o, *dq, *scores, *slopes, *dk, *dv, *left_q, *left_d_o;
  };

  static int64_t floats(const Shape& s) {
    return kBlock * (2 * s.key_width() + s.value_width() + 2 * kBlock) +
           kBlock * (Rows::row(s.H) + Rows::row(s.W)) +
           s.keys() * (s.key_width() + s.value_width());
  }

  void block(const Head<T>& head, int64_t b, int64_t n, int64_t index, const Scratch& w) const {
    const int64_t H = s.key_width(), W = s.value_width(), query = index * kBlock;
    const int64_t rows = std::min(kBlock, s.T - query);
    const int64_t first = (b * s.T + query) * s.N + n;
    gather(q + first * s.H, rows, s.H, s.N * s.H, options.scale, w.q, rows, H);
    gather(d_o + first * s.W, rows, s.W, s.N * s.W, 1.0f, w.d_o, rows, W);
    const float* left_q = Rows::left(q + first * s.H, rows, s.H, s.N * s.H, w.q, w.left_q);
    const float* left_d_o = Rows::left(d_o + first * s.W, rows, s.W, s.N * s.W, w.d_o, w.left_d_o);
    std::fill(w.dq, w.dq + kBlock * H, 0.0f);
    float delta[kBlock];  // the part of every score's slope that the softmax's sum gives back
    for (int64_t i = 0; i < rows; ++i) {
      const T* out = o + (first + i * s.N) * s.W;
      float dots[kLanes] = {};
      for (int64_t j = 0; j < s.W; ++j) dots[j % kLanes] += widen(out[j]) * w.d_o[i * W + j];
      delta[i] = sum(load(dots));
    }
    const float* lse_block = lse + (b * s.N + n) * s.T + query;
    for (size_t other = 0; other < head.key_blocks.size(); ++other) {
      const Sight how = sight(head.query_blocks[index], head.key_blocks[other], options);
      if (how == Sight::kNone) continue;
      const int64_t key = other * kBlock;
      score(head, s, options, left_q, query, key, rows, how, w.scores);
      Rows::run(rows, s.W, left_d_o, head.vt + key * Rows::row(s.W), w.slopes);
      for (int64_t i = 0; i < rows; ++i) {
        differentiate(w.scores + i * kBlock, w.slopes + i * kBlock, lse_block[i], delta[i]);
      }
      product(kBlock, W, rows, {w.scores, 1, kBlock}, w.d_o, W, w.dv + key * W, W, true);
      product(kBlock, H, rows, {w.slopes, 1, kBlock}, w.q, H, w.dk + key * H, H, true);
      product(rows, H, kBlock, {w.slopes, kBlock, 1}, head.k + key * H, H, w.dq, H, true);
    }
    scatter(w.dq, rows, s.H, H, options.scale, dq + first * s.H, s.N * s.H);
  }

  // Scores of one query become weights, and slopes of its weights become slopes of its scores.
  void differentiate(float* scores, float* slopes, float lse_, float delta) const {
    const float cap = options.softcap;
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      const Vec x = load(scores + j);
      const Vec p = weight(x, splat(lse_));
      Vec slope = p * (load(slopes + j) - delta);
      if (cap != 0) slope = where(x > kLowest, slope * (1.0f - (x / cap) * (x / cap)));
      store(scores + j, p);
      store(slopes + j, slope);
    }
  }

  void run(ffi::ThreadPool& pool) const {
    parallel_for(pool, s.B * s.K, [&](int64_t task) {
      const int64_t b = task / s.K, kv = task % s.K;
      const int64_t S = s.keys(), H = s.key_width(), W = s.value_width();
      Arena& arena = Arena::of_this_thread();
      [[maybe_unused]] const Tiles tiles;
      arena.start(Head<T>::floats(s) + floats(s));
      const Head<T> head(arena, s, k, v, position_q, position_k, segment_q, segment_k, b, kv, true);
      Scratch w;
      w.q = arena.take(kBlock * H);
      w.d_o = arena.take(kBlock * W);
      w.dq = arena.take(kBlock * H);
      w.scores = arena.take(kBlock * kBlock);
      w.slopes = arena.take(kBlock * kBlock);
      w.dk = arena.take(S * H);
      w.dv = arena.take(S * W);
      w.left_q = arena.take(kBlock * Rows::row(s.H));
      w.left_d_o = arena.take(kBlock * Rows::row(s.W));
      std::fill(w.dk, w.dk + S * H, 0.0f);
      std::fill(w.dv, w.dv + S * W, 0.0f);
      for (int64_t n = kv * s.group(); n < (kv + 1) * s.group(); ++n) {
        for (int64_t i = 0; i < s.queries() / kBlock; ++i) block(head, b, n, i, w);
      }
      scatter(w.dk, s.S, s.H, H, 1.0f, dk + (b * s.S * s.K + kv) * s.H, s.K * s.H);
      scatter(w.dv, s.S, s.W, W, 1.0f, dv + (b * s.S * s.K + kv) * s.W, s.K * s.W);
    });
  }
};

Shape shape_of(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v) {
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  return {qd[0], qd[1], kd[1], qd[2], kd[2], qd[3], vd[3]};
}

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

template <typename T>
void forward(ffi::ThreadPool& pool, const Options& options, const ffi::AnyBuffer& q,
             const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Ints& position_q,
             const Ints& position_k, const Ints& segment_q, const Ints& segment_k,
             const Floats& sinks, ffi::AnyBuffer& o, Floats& lse) {
  Forward<T>{shape_of(q, k, v),
             options,
             static_cast<const T*>(q.untyped_data()),
             static_cast<const T*>(k.untyped_data()),
             static_cast<const T*>(v.untyped_data()),
             position_q.typed_data(),
             position_k.typed_data(),
             segment_q.typed_data(),
             segment_k.typed_data(),
             sinks.element_count() ? sinks.typed_data() : nullptr,
             static_cast<T*>(o.untyped_data()),
             lse.typed_data()}
      .run(pool);
}

ffi::Error forward_call(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        Ints position_q, Ints position_k, Ints segment_q, Ints segment_k,
                        Floats sinks, ffi::Result<ffi::AnyBuffer> o, ffi::Result<Floats> lse,
                        float scale, float softcap, int64_t window, bool causal) {
  const Options options{scale, softcap, window, causal};
  const auto run = q.element_type() == ffi::F32 ? forward<float> : forward<Half>;
  run(pool, options, q, k, v, position_q, position_k, segment_q, segment_k, sinks, *o, *lse);
  return ffi::Error::Success();
}

template <typename T>
void backward(ffi::ThreadPool& pool, const Options& options, const ffi::AnyBuffer& q,
              const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const Ints& position_q,
              const Ints& position_k, const Ints& segment_q, const Ints& segment_k,
              const Floats& lse, const ffi::AnyBuffer& o, const ffi::AnyBuffer& d_o,
              ffi::AnyBuffer& dq, ffi::AnyBuffer& dk, ffi::AnyBuffer& dv) {
  Backward<T>{shape_of(q, k, v),
              options,
              static_cast<const T*>(q.untyped_data()),
              static_cast<const T*>(k.untyped_data()),
              static_cast<const T*>(v.untyped_data()),
              position_q.typed_data(),
              position_k.typed_data(),
              segment_q.typed_data(),
              segment_k.typed_data(),
              lse.typed_data(),
              static_cast<const T*>(o.untyped_data()),
              static_cast<const T*>(d_o.untyped_data()),
              static_cast<T*>(dq.untyped_data()),
              static_cast<T*>(dk.untyped_data()),
              static_cast<T*>(dv.untyped_data())}
      .run(pool);
}

ffi::Error backward_call(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         Ints position_q, Ints position_k, Ints segment_q, Ints segment_k,
                         Floats lse, ffi::AnyBuffer o, ffi::AnyBuffer d_o,
                         ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                         ffi::Result<ffi::AnyBuffer> dv, float scale, float softcap, int64_t window,
                         bool causal) {
  const Options options{scale, softcap, window, causal};
  const auto run = q.element_type() == ffi::F32 ? backward<float> : backward<Half>;
  run(pool, options, q, k, v, position_q, position_k, segment_q, segment_k, lse, o, d_o, *dq, *dk,
      *dv);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_attention_forward, fornax::forward_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Floats>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<fornax::Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("causal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_attention_backward, fornax::backward_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Floats>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("causal"));
