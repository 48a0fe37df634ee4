// Attention over a paged cache on CPU, and the write into it, straight through the page tables.
//
// A token's result is bitwise the same whatever else is in the step, however its prompt was cut into
// chunks and however many threads there are. So nothing in its arithmetic depends on those: keys come
// in blocks and segments that begin at fixed positions, a segment's blocks are joined by a running
// maximum and sum (Dao 2023), and segments are joined one after the other. A key that a query does not
// see adds exact zeros to it. Tiles, tasks and threads only decide who computes what.
//
// Letters: T tokens of the step, N query heads, K key/value heads, G = N / K, H head width, P pages of
// a layer, S slots of a page, C = 2 K or, where keys are values too, K, R rows
// (sequences), W pages of a table's row. q, o [T, N, H]; kv [L, P, S, C, H]. A line is one query head
// of one token. Of a cache of codes (paged_codes.h), scales [L, P, 1, C S] come beside it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crew.h"
#include "paged_block.h"
#include "paged_codes.h"

namespace fornax {
namespace {

constexpr int64_t kSegment = 4 * kKeys;   // keys of a segment
constexpr int64_t kTileLines = 64;        // lines that share one packing of a block
constexpr int64_t kFewLines = 16;         // up to here a tile takes all key heads in one task
constexpr int64_t kSmall = 1 << 16;       // elements of the cache that are not worth a second thread

// What some lines have gathered from some keys: their scores' maximum, the sum of e^(score - maximum),
// and the values weighted alike.
struct Partial {
  float *top, *total, *out;
  static int64_t floats(int64_t lines, int64_t width) { return lines * (width + 2); }
  static Partial at(float* memory, int64_t lines, int64_t width) {
    return {memory + lines * width, memory + lines * (width + 1), memory};
  }
  void clear(int64_t lines, int64_t width) const {
    std::fill(top, top + lines, kLowest);
    std::fill(total, total + lines, 0.0f);
    std::fill(out, out + lines * width, 0.0f);
  }
};

// Adds the next segment. One compiled body, so that its rounding is the same for every caller.
__attribute__((noinline)) void join(const Partial& sum_, const Partial& next, int64_t lines,
                                    int64_t width) {
  for (int64_t i = 0; i < lines; ++i) {
    if (next.total[i] == 0) continue;  // saw nothing there
    const float now = std::max(sum_.top[i], next.top[i]);
    const float before = std::exp(sum_.top[i] - now), after = std::exp(next.top[i] - now);
    float* out = sum_.out + i * width;
    const float* added = next.out + i * width;
    for (int64_t j = 0; j < width; j += kLanes) {
      store(out + j, load(out + j) * splat(before) + load(added + j) * splat(after));
    }
    sum_.total[i] = sum_.total[i] * before + next.total[i] * after;
    sum_.top[i] = now;
  }
}

struct Step {
  int64_t T, N, H, P, S, C, R, W, K;
  int64_t vectors;  // of a slot and key head: key and value, or one that is both
  int64_t layer;
  const int32_t *table, *start, *lens;
  const float* sinks;   // null: none
  const float* scales;  // of a cache of codes
  float scale, softcap;  // softcap 0: none
  int64_t window;        // 0: none
  int64_t group() const { return N / K; }
  int64_t width() const { return round_up(H, kLanes); }
};

// Some tokens of one row that share their keys, and the key heads that one task takes for them.
struct Item {
  int64_t row, token, count, position;
  int64_t head, heads;
  int64_t low, high;      // keys that some token sees
  int64_t parts = 1;      // tasks that share the segments
  int64_t partials = 0;   // where the tasks leave what they gathered, if they are several
  int64_t first_segment() const { return low / kSegment; }
  int64_t segments() const { return (high - 1) / kSegment + 1 - first_segment(); }
  int64_t cost() const { return (high - low) * heads * (8 + count); }
};

// One segment of an item; none without an item.
struct Segment {
  const Item* item = nullptr;
  int64_t index = 0;
};

template <typename Q, typename T>
struct Attend {
  Step s;
  const Q* q;
  const T* kv;
  Q* o;

  int64_t lines(const Item& item) const { return item.count * s.group() * item.heads; }

  struct Scratch {
    float *queries, *keys, *values, *turned, *scores, *shrink, *key_scales, *value_scales;
    const T *key_at[kKeys], *value_at[kKeys];
    const float* wide_value_at[kKeys];
  };

  // Whether a block is first copied together as padded floats: worth it for many lines, which would
  // else fetch each key from another corner of the cache again and again.
  bool widens(const Item& item) const {
    return s.H % kLanes != 0 || item.count * s.group() > kFewLines;
  }

  int64_t scratch_floats(const Item& item) const {
    const int64_t tile = item.count * s.group();
    return lines(item) * s.width() + kKeys * (3 * s.width() + tile + 2) + round_up(tile, 16) +
           2 * round_up(Partial::floats(lines(item), s.width()), 16) + 16;
  }

  Scratch scratch(const Item& item, Arena& arena) const {
    const int64_t tile = item.count * s.group(), width = s.width();
    Scratch w;
    w.keys = arena.take(kKeys * width);
    w.values = arena.take(kKeys * width);
    w.turned = arena.take(kKeys * width);
    w.scores = arena.take(kKeys * tile);
    w.shrink = arena.take(round_up(tile, 16));
    w.key_scales = arena.take(kKeys);
    w.value_scales = s.vectors == 2 ? arena.take(kKeys) : w.key_scales;
    w.queries = arena.take(round_up(lines(item) * width, 16));
    for (int64_t j = 0; j < kKeys; ++j) {
      w.wide_value_at[j] = (s.vectors == 2 ? w.values : w.keys) + j * width;
    }
    if (width != s.H) std::fill(w.keys, w.keys + 2 * kKeys * width, 0.0f);
    load_queries(item, w.queries);
    return w;
  }

  // Lines by head, then token, then head of the group.
  void load_queries(const Item& item, float* to) const {
    const int64_t G = s.group(), width = s.width();
    for (int64_t head = item.head; head < item.head + item.heads; ++head) {
      for (int64_t i = 0; i < item.count * G; ++i, to += width) {
        const Q* from = q + ((item.token + i / G) * s.N + head * G + i % G) * s.H;
        for (int64_t j = 0; j < s.H; ++j) to[j] = widen(from[j]) * s.scale;
        std::fill(to + s.H, to + width, 0.0f);
      }
    }
  }

  // Consecutive slots of a page, and where the scales of the item's first vector lie for them.
  struct Run {
    int64_t first, count;
    const float* scales;
  };

  // A block of keys: where its slots lie, and of a cache of codes its runs.
  struct Block {
    const T* slots[kKeys];
    Run runs[kCodes<T> ? kKeys : 1];
    int64_t count = 0;  // runs
  };

  // Finds the block that begins at `base`. Keys that no token sees have no page: the nearest that is
  // seen stands for them.
  void find(const Item& item, int64_t base, Block& block) const {
    const T** to = block.slots;
    block.count = 0;
    const int64_t low = std::max(item.low, base), high = std::min(item.high, base + kKeys);
    for (int64_t position = low; position < high;) {
      const int64_t page = s.table[item.row * s.W + position / s.S], slot = position % s.S;
      const T* at = kv + (((s.layer * s.P + page) * s.S + slot) * s.C) * s.H;
      const int64_t end = std::min(high, position + s.S - slot);
      if constexpr (kCodes<T>) {
        const int64_t vector = (s.layer * s.P + page) * s.C + s.vectors * item.head;
        block.runs[block.count++] = {position - base, end - position,
                                     s.scales + vector * s.S + slot};
      }
      for (; position < end; ++position, at += s.C * s.H) to[position - base] = at;
    }
    for (int64_t j = base; j < low; ++j) to[j - base] = to[low - base];
    for (int64_t j = high; j < base + kKeys; ++j) to[j - base] = to[high - 1 - base];
  }

  // The scales of a block's keys and values for the item's `head`-th head; 0 for keys that it does
  // not have.
  void load_scales(const Block& block, int64_t head, Scratch& w) const {
    int64_t end = 0;
    const auto fill = [&](float* to, int64_t vector) {
      std::fill(to, to + block.runs[0].first, 0.0f);
      for (int64_t i = 0; i < block.count; ++i) {
        const Run& run = block.runs[i];
        const float* from = run.scales + vector * s.S;
        for (int64_t j = 0; j < run.count; ++j) to[run.first + j] = from[j] * T::kUnit;
        end = run.first + run.count;
      }
      std::fill(to + end, to + kKeys, 0.0f);
    };
    fill(w.key_scales, s.vectors * head);
    if (s.vectors == 2) fill(w.value_scales, s.vectors * head + 1);
  }

  void fetch_scales(const Item& item, const Block& block) const {
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t floats = s.vectors * item.heads * s.S;
      for (int64_t j = 0; j < floats; j += 16) __builtin_prefetch(block.runs[i].scales + j);
    }
  }

  // What asks for the block whose slots these are.
  Ahead ahead(const Item& item, const T* const* slots, const char** from) const {
    for (int64_t j = 0; j < kKeys; ++j) {
      from[j] = reinterpret_cast<const char*>(slots[j] + s.vectors * item.head * s.H);
    }
    return {from, kKeys, static_cast<int64_t>(s.vectors * item.heads * s.H * sizeof(T))};
  }

  // Scores of one line become weights, of codes the factors of these. Keys low..high of the block are
  // visible to it.
  float soften(const Scratch& w, float* scores, int64_t columns, int64_t low, int64_t high,
               float* top, float* total) const {
    const bool cut = low > 0 || high < columns;
    IntVec lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    Vec most = splat(kLowest);
    for (int64_t j = 0; j < columns; j += kLanes) {
      Vec x = load(scores + j);
      if constexpr (kCodes<T>) x *= load(w.key_scales + j);
      if (s.softcap != 0) x = s.softcap * hyperbolic_tangent(x / s.softcap);
      if (cut) {
        const IntVec key = lanes + static_cast<int32_t>(j);
        const IntVec seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
        x = where(seen, x, splat(kLowest));
      }
      store(scores + j, x);
      most = maximum(most, x);
    }
    const float now = std::max(*top, fold(most, [](Vec a, Vec b) { return maximum(a, b); }));
    Vec added = splat(0.0f);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const Vec x = load(scores + j);
      const Vec weight = where(~(x <= kLowest), exponential(x - now));
      if constexpr (kCodes<T>) {
        store(scores + j, weight * load(w.value_scales + j));
      } else {
        store(scores + j, weight);
      }
      added += weight + (x - x);  // the difference is NaN if x is, which the exponential hides
    }
    const float shrink = now == *top ? 1.0f : std::exp(*top - now);
    *total = *total * shrink + fold(added, [](Vec a, Vec b) { return a + b; });
    *top = now;
    return shrink;
  }

  // One head's lines against the block of keys that begins at `base`.
  void block(const Item& item, int64_t base, int64_t head, const T* const* slots, Scratch& w,
             const float* queries, const Partial& sum_, Ahead& ahead) const {
    const int64_t tile = item.count * s.group();
    const int64_t low = std::max<int64_t>(item.low - base, 0);
    const int64_t high = std::min(item.high - base, kKeys);
    const int64_t columns = round_up(high, kLanes);
    for (int64_t j = 0; j < columns; ++j) {
      w.key_at[j] = slots[j] + s.vectors * head * s.H;
      w.value_at[j] = w.key_at[j] + (s.vectors - 1) * s.H;
    }
    if (widens(item)) {
      widen_rows(w.key_at, columns, w.keys);
      if (s.vectors == 2) widen_rows(w.value_at, columns, w.values);
      transpose_keys(w.keys, columns, s.width(), w.turned);
      score_transposed(tile, columns, queries, w.turned, s.width(), w.scores);
      soften_all(item, base, columns, w, sum_);
      gather_values(tile, low, high, w.scores, w.wide_value_at, w.shrink, sum_.out, s.width(),
                    ahead);
    } else {
      score(tile, columns, queries, w.key_at, s.width(), w.scores, ahead);
      soften_all(item, base, columns, w, sum_);
      gather_values(tile, low, high, w.scores, w.value_at, w.shrink, sum_.out, s.width(), ahead);
    }
  }

  void widen_rows(const T* const* rows, int64_t count, float* to) const {
    for (int64_t j = 0; j < count; ++j, to += s.width()) {
      int64_t h = 0;
      for (; h + kLanes <= s.H; h += kLanes) store(to + h, load_wide(rows[j] + h));
      for (; h < s.H; ++h) to[h] = widen(rows[j][h]);
    }
  }

  void soften_all(const Item& item, int64_t base, int64_t columns, Scratch& w,
                  const Partial& sum_) const {
    const int64_t G = s.group();
    for (int64_t i = 0; i < item.count * G; ++i) {
      const int64_t position = item.position + i / G - base;
      const int64_t first = s.window ? std::max<int64_t>(position - s.window + 1, 0) : 0;
      w.shrink[i] = soften(w, w.scores + i * kKeys, columns, first,
                           std::min(position + 1, columns), sum_.top + i, sum_.total + i);
    }
  }

  // Where a segment's keys begin, and where they end.
  static int64_t first_key(const Item& item, int64_t index) {
    return std::max(index * kSegment, item.low / kKeys * kKeys);
  }
  static int64_t end_key(const Item& item, int64_t index) {
    return std::min((index + 1) * kSegment, item.high);
  }

  // Gathers one segment; `next` is what the thread is likely to gather after it.
  void segment(const Segment& at, const Segment& next, Scratch& w, const Partial& sum_) const {
    const Item& item = *at.item;
    const int64_t tile = item.count * s.group();
    sum_.clear(lines(item), s.width());
    const int64_t first = first_key(item, at.index), end = end_key(item, at.index);
    Block blocks[2];
    const char* from[kKeys];
    find(item, first, blocks[0]);
    ahead(item, blocks[0].slots, from).rest();
    for (int64_t base = first, turn = 0; base < end; base += kKeys, turn ^= 1) {
      const bool more = base + kKeys < end;
      Ahead soon;
      if (const Item* then = more ? &item : next.item) {
        find(*then, more ? base + kKeys : first_key(*then, next.index), blocks[turn ^ 1]);
        soon = ahead(*then, blocks[turn ^ 1].slots, from);
        if constexpr (kCodes<T>) fetch_scales(*then, blocks[turn ^ 1]);
      }
      for (int64_t i = 0; i < item.heads; ++i) {
        const Partial mine = {sum_.top + i * tile, sum_.total + i * tile,
                              sum_.out + i * tile * s.width()};
        if constexpr (kCodes<T>) load_scales(blocks[turn], i, w);
        block(item, base, item.head + i, blocks[turn].slots, w, w.queries + i * tile * s.width(),
              mine, soon);
      }
      soon.rest();
    }
  }

  void finish(const Item& item, const Partial& sum_) const {
    const int64_t G = s.group();
    for (int64_t i = 0; i < lines(item); ++i) {
      const int64_t head = (item.head + i / (item.count * G)) * G + i % G;
      const int64_t token = item.token + i / G % item.count;
      float top = sum_.top[i], total = sum_.total[i], keep = 1;
      if (s.sinks) {
        const float now = std::max(top, s.sinks[head]);
        keep = std::exp(top - now);
        total = total * keep + std::exp(s.sinks[head] - now);
      }
      const float factor = total == 0 ? 0 : keep / total;
      Q* to = o + (token * s.N + head) * s.H;
      for (int64_t j = 0; j < s.H; ++j) narrow(sum_.out[i * s.width() + j] * factor, to + j);
    }
  }

  // All segments of an item, joined in order.
  void whole(const Item& item, const Segment& next, Arena& arena) const {
    Scratch w = scratch(item, arena);
    const int64_t room = round_up(Partial::floats(lines(item), s.width()), 16);
    const Partial sum_ = Partial::at(arena.take(room), lines(item), s.width());
    const Partial added = Partial::at(arena.take(room), lines(item), s.width());
    const int64_t first = item.first_segment(), end = first + item.segments();
    for (int64_t i = first; i < end; ++i) {
      segment({&item, i}, i + 1 < end ? Segment{&item, i + 1} : next, w, i > first ? added : sum_);
      if (i > first) join(sum_, added, lines(item), s.width());
    }
    finish(item, sum_);
  }

  Partial partial(const Item& item, float* memory, int64_t index) const {
    memory += item.partials + index * Partial::floats(lines(item), s.width());
    return Partial::at(memory, lines(item), s.width());
  }

  // One segment of an item; who ends last joins them.
  void share(const Segment& at, const Segment& next, float* memory, std::atomic<int64_t>& left,
             Arena& arena) const {
    const Item& item = *at.item;
    Scratch w = scratch(item, arena);
    segment(at, next, w, partial(item, memory, at.index - item.first_segment()));
    if (left.fetch_sub(1) != 1) return;
    const Partial sum_ = partial(item, memory, 0);
    for (int64_t i = 1; i < item.segments(); ++i) {
      join(sum_, partial(item, memory, i), lines(item), s.width());
    }
    finish(item, sum_);
  }

  // A few lines' items have `together` heads each, whose keys and values lie beside each other.
  std::vector<Item> items(int64_t together) const {
    std::vector<Item> all;
    const int64_t G = s.group(), most = std::max<int64_t>(1, kTileLines / G);
    for (int64_t row = 0; row < s.R; ++row) {
      const int64_t end = s.start[row + 1];
      for (int64_t token = s.start[row]; token < end; token += most) {
        Item item;
        item.row = row;
        item.token = token;
        item.count = std::min(most, end - token);
        item.position = s.lens[row] - (end - token);
        item.high = item.position + item.count;
        item.low = s.window ? std::max<int64_t>(item.position - s.window + 1, 0) : 0;
        const int64_t heads = item.count * G <= kFewLines ? together : 1;
        for (item.head = 0; item.head < s.K; item.head += heads) {
          item.heads = std::min(heads, s.K - item.head);
          all.push_back(item);
        }
      }
    }
    return all;
  }

  void run(ffi::ThreadPool& pool) const {
    const int64_t threads = pool.num_threads();
    std::vector<Item> all = items(s.K);
    int64_t segments = 0;
    for (const Item& item : all) segments += item.segments();
    if (threads > 1 && segments < 2 * threads) {
      all = items(std::max<int64_t>(1, s.K * segments / (2 * threads)));
    }
    const bool scarce = static_cast<int64_t>(all.size()) < 4 * threads;
    int64_t floats = 0, elements = 0;
    std::vector<std::pair<int64_t, int64_t>> tasks;  // item, and which of its parts
    for (size_t i = 0; i < all.size(); ++i) {
      Item& item = all[i];
      elements += (item.high - item.low) * item.heads * s.vectors * s.H;
      if (threads > 1 && (scarce || item.heads == s.K)) item.parts = item.segments();
      if (item.parts > 1) {
        item.partials = floats;
        floats += item.parts * Partial::floats(lines(item), s.width());
      }
      for (int64_t part = 0; part < item.parts; ++part) tasks.emplace_back(i, part);
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](const auto& a, const auto& b) {
      return all[a.first].cost() / all[a.first].parts > all[b.first].cost() / all[b.first].parts;
    });
    static thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
    float* partials = memory.data();
    std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[all.size()]);
    for (size_t i = 0; i < all.size(); ++i) left[i] = all[i].parts;
    const auto count = static_cast<int64_t>(tasks.size());
    const auto place = [&](int64_t index) {
      if (index >= count) return Segment{};
      const Item& item = all[tasks[index].first];
      return Segment{&item, item.first_segment() + tasks[index].second};
    };
    const auto work = [&](int64_t index) {
      const Segment at = place(index), next = place(index + threads);
      Arena& arena = Arena::of_this_thread();
      arena.start(scratch_floats(*at.item));
      if (at.item->parts == 1) {
        whole(*at.item, next, arena);
      } else {
        share(at, next, partials, left[tasks[index].first], arena);
      }
    };
    if (elements <= kSmall) {
      for (int64_t i = 0; i < count; ++i) work(i);
    } else {
      share_rows(pool, s.T, count, work);
    }
    std::fill(o + s.start[s.R] * s.N * s.H, o + s.T * s.N * s.H, Q());
  }
};

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("paged_attention: " + message);
}

// Calls use(T()) for the type T of a buffer's elements.
template <typename Use>
void on_element(ffi::DataType type, const Use& use) {
  switch (type) {
    case ffi::F32: return use(float());
    case ffi::S8: return use(Int8());
    case ffi::F8E4M3FN: return use(Float8());
    default: return use(Half());
  }
}

// Refuses what would read outside the arrays.
ffi::Error check(const Step& s, int64_t layers) {
  if (s.layer < 0 || s.layer >= layers) {
    return invalid("layer=" + std::to_string(s.layer) + " of " + std::to_string(layers));
  }
  for (int64_t row = 0; row < s.R; ++row) {
    const int64_t count = s.start[row + 1] - s.start[row], length = s.lens[row];
    const std::string name = "row " + std::to_string(row);
    if (s.start[row] < 0 || count < 0 || s.start[row + 1] > s.T) {
      return invalid(name + " has query_start outside the step's tokens");
    }
    if (count == 0) continue;
    if (length < count || length > s.W * s.S) {
      return invalid(name + " has context_lens=" + std::to_string(length) + "; it must be " +
                     std::to_string(count) + " (its tokens) to " + std::to_string(s.W * s.S) +
                     " (its table's pages)");
    }
    const int64_t low = s.window ? std::max<int64_t>(length - count - s.window + 1, 0) : 0;
    for (int64_t i = low / s.S; i <= (length - 1) / s.S; ++i) {
      const int64_t page = s.table[row * s.W + i];
      if (page < 0 || page >= s.P) {
        return invalid(name + " names page " + std::to_string(page) + " of " + std::to_string(s.P));
      }
    }
  }
  return ffi::Error::Success();
}

template <typename Q, typename T>
void attend(const Step& s, ffi::ThreadPool& pool, const ffi::AnyBuffer& q, const ffi::AnyBuffer& kv,
            ffi::AnyBuffer& o) {
  Attend<Q, T>{s, static_cast<const Q*>(q.untyped_data()), static_cast<const T*>(kv.untyped_data()),
               static_cast<Q*>(o.untyped_data())}
      .run(pool);
}

ffi::Error attend_call(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, Ints layer,
                       Ints table, Ints start, Ints lens, Floats sinks, Floats scales,
                       ffi::Result<ffi::AnyBuffer> o, float scale, float softcap, int64_t window,
                       bool shared) {
  const auto qd = q.dimensions(), kvd = kv.dimensions(), td = table.dimensions();
  Step s;
  s.T = qd[0], s.N = qd[1], s.H = qd[2];
  s.P = kvd[1], s.S = kvd[2], s.C = kvd[3];
  s.R = td[0], s.W = td[1];
  s.vectors = shared ? 1 : 2;
  s.K = s.C / s.vectors;
  s.layer = layer.typed_data()[0];
  s.table = table.typed_data(), s.start = start.typed_data(), s.lens = lens.typed_data();
  s.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  s.scales = scales.typed_data();
  s.scale = scale, s.softcap = softcap, s.window = window;
  if (ffi::Error error = check(s, kvd[0]); error.failure()) return error;
  on_element(q.element_type(), [&](auto query) {
    on_element(kv.element_type(), [&](auto key) {
      using Q = decltype(query);
      if constexpr (!kCodes<Q>) attend<Q, decltype(key)>(s, pool, q, kv, *o);
    });
  });
  return ffi::Error::Success();
}

// Calls put(token, vector, numbers) for each key and value, in the order of a slot; without v for keys
// alone.
template <typename From, typename Put>
void each_vector(ffi::ThreadPool& pool, const From* k, const From* v, int64_t tokens, int64_t heads,
                 int64_t width, const Put& put) {
  constexpr int64_t kTokens = 64;
  const auto some = [&](int64_t index) {
    for (int64_t t = index * kTokens; t < std::min(tokens, (index + 1) * kTokens); ++t) {
      for (int64_t i = 0; i < heads; ++i) {
        const int64_t from = (t * heads + i) * width;
        put(t, v ? 2 * i : i, k + from);
        if (v) put(t, 2 * i + 1, v + from);
      }
    }
  };
  const int64_t tasks = (tokens + kTokens - 1) / kTokens;
  if (tokens * heads * width <= kSmall) {
    for (int64_t i = 0; i < tasks; ++i) some(i);
  } else {
    share_rows(pool, tokens, tasks, some);
  }
}

// Writes into a layer of the cache; `scales` [L, P, 1, C S] are those of a cache of codes.
ffi::Error write(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                 Ints layer, Ints slots, ffi::Result<ffi::AnyBuffer> kv, float* scales) {
  const auto kvd = kv->dimensions(), kd = k.dimensions();
  const int64_t tokens = kd[0], heads = kd[1], width = kd[2], room = kvd[1] * kvd[2];
  const int64_t index = layer.typed_data()[0];
  if (cache.untyped_data() != kv->untyped_data()) return invalid("the cache is not written in place");
  if (index < 0 || index >= kvd[0]) return invalid("layer=" + std::to_string(index));
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = slots.typed_data()[t];
    if (slot < 0 || slot >= room) {
      return invalid("token " + std::to_string(t) + " names slot " + std::to_string(slot) + " of " +
                     std::to_string(room));
    }
  }
  const int64_t vectors = kvd[3], page_size = kvd[2], first = index * room;
  on_element(k.element_type(), [&](auto from) {
    on_element(kv->element_type(), [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (!kCodes<From>) {
        const auto* values = static_cast<const From*>(v.element_count() ? v.untyped_data() : nullptr);
        To* codes = static_cast<To*>(kv->untyped_data()) + first * vectors * width;
        const auto put = [&](int64_t token, int64_t vector, const From* x) {
          const int64_t slot = slots.typed_data()[token];
          To* at = codes + (slot * vectors + vector) * width;
          if constexpr (kCodes<To>) {
            const int64_t page = (first + slot) / page_size;
            scales[(page * vectors + vector) * page_size + slot % page_size] = encode(x, width, at);
          } else {
            for (int64_t j = 0; j < width; ++j) narrow(widen(x[j]), at + j);
          }
        };
        each_vector(pool, static_cast<const From*>(k.untyped_data()), values, tokens, heads, width,
                    put);
      }
    });
  });
  return ffi::Error::Success();
}

ffi::Error write_call(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                      Ints layer, Ints slots, ffi::Result<ffi::AnyBuffer> kv) {
  return write(pool, cache, k, v, layer, slots, kv, nullptr);
}

ffi::Error write_codes_call(ffi::ThreadPool pool, ffi::AnyBuffer cache, Floats old, ffi::AnyBuffer k,
                            ffi::AnyBuffer v, Ints layer, Ints slots,
                            ffi::Result<ffi::AnyBuffer> kv, ffi::Result<Floats> scales) {
  if (old.untyped_data() != scales->untyped_data()) return invalid("scales are not written in place");
  return write(pool, cache, k, v, layer, slots, kv, scales->typed_data());
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_paged_attention, fornax::attend_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Floats>()
                                  .Arg<fornax::Floats>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("shared"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_paged_write, fornax::write_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_paged_write_codes, fornax::write_codes_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Floats>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<fornax::Ints>()
                                  .Arg<fornax::Ints>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<fornax::Floats>());
