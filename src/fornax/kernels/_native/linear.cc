// y = x w for weights that were packed once: float32, bfloat16, or 8-bit integers with scales.
//
// Letters: L layers, M rows, K inputs, N outputs, P panels of 32 outputs, U words of inputs, G groups
// of 64 inputs. x [M, K], y [M, N], values [L, P, U, 32] words, scales [L, P, G, 32].
//
// A word is 4 bytes: one float32, two bfloat16 or four 8-bit inputs, so that all three are one
// algorithm. Every output is summed in one order, blocks of kBlock words one after the other, whatever
// the number of rows and threads: a row's result does not depend on what else is in the batch.

#include <algorithm>
#include <cmath>
#include <vector>

#include "crew.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fornax {
namespace {

constexpr int64_t kPanel = 32;       // outputs of a panel
constexpr int64_t kBlock = 128;      // words of a block: two of them, of 32 outputs, fit the first cache
constexpr int64_t kGroup = 64;       // inputs that share a scale
constexpr int64_t kGroupWords = 16;  // words of a group
constexpr int kColumns = 2 * kLanes;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // rows whose sums fill the registers
#else
constexpr int kTile = 6;
#endif
constexpr int64_t kPass = 480;       // rows that are prepared at once
constexpr int64_t kRowBlock = 240;   // rows of a task: with kBlock words they fit the second cache
constexpr int64_t kPanels = 8;       // most panels of a task
constexpr int64_t kSharing = 4;      // most tiles that share the fetching of the next block

// Rows of x, made ready for the product: tiles of up to kTile rows, each [numbers, rows], of which a
// word of weights takes one or two.
struct Rows {
  int64_t count, numbers, groups, tiles;
  float* values;   // [tiles][numbers, rows]
  float* scales;   // [tiles][G, rows], for 8-bit values
  int32_t* start;  // [tiles][G, rows]: what a group's sum begins with

  Rows(int64_t count, int64_t numbers, int64_t groups)
      : count(count), numbers(numbers), groups(groups), tiles((count + kTile - 1) / kTile) {}

  // Rows are spread evenly, so that no tile is much smaller than the others.
  int64_t first(int64_t tile) const { return count * tile / tiles; }

  int64_t floats() const { return count * (numbers + 2 * groups) + 3 * kLanes; }

  void take(Arena& arena) {
    values = arena.take(round_up(count * numbers, kLanes));
    scales = arena.take(round_up(count * groups, kLanes));
    start = reinterpret_cast<int32_t*>(arena.take(count * groups));
  }
};

// A part of a product: where its words lie and what it adds to.
struct Part {
  int64_t words;
  const float* x;        // [numbers, rows]
  const float* w;        // [words, kPanel]
  const float* x_scale;  // [groups, rows]
  const int32_t* start;  // [groups, rows]
  const float* w_scale;  // [groups, kPanel]
  float* c;              // [rows, kPanel]
  bool add;              // whether c holds the blocks before
  const float* ahead;    // what will be multiplied next, to be fetched meanwhile,
  int64_t ahead_step;    // so many floats for each word
};

// A word in every lane. As an integer: halves of a word may look like a denormal or a signalling
// float, which arithmetic would change.
inline Vec splat_word(const float* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return from_bits(splat(word));
}

// Numbers of x lie `rows` apart, from that of the row on.
struct Float32 {
  static constexpr int64_t kNumbers = 1;  // of x for a word
  static constexpr bool kGrouped = false;

  static Vec add(Vec acc, const float* x, int, Vec w) { return acc + splat_word(x) * w; }

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t, float* numbers, float*, int32_t*) {
    for (int64_t k = 0; k < inputs; ++k) numbers[k] = widen(row[k]);
  }
};

struct BFloat16 {
  static constexpr bool kGrouped = false;

#if defined(__AVX512BF16__)
  static constexpr int64_t kNumbers = 1;

  static Vec add(Vec acc, const float* x, int, Vec w) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)splat_word(x));
  }
#else
  static constexpr int64_t kNumbers = 2;  // widened: in the product it would be a third of its work

  static Vec add(Vec acc, const float* x, int rows, Vec w) {
    acc += splat_word(x) * from_bits(bits(w) << 16);
    return acc + splat_word(x + rows) * from_bits(bits(w) & splat(static_cast<int32_t>(0xffff0000)));
  }
#endif

  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words, float* numbers, float*,
                      int32_t*) {
    std::memset(numbers, 0, words * kNumbers * sizeof *numbers);
    for (int64_t k = 0; k < inputs; ++k) {
      Half half;
      narrow(widen(row[k]), &half);
      if constexpr (kNumbers == 2) {
        numbers[k] = widen(half);
      } else {
        std::memcpy(reinterpret_cast<char*>(numbers) + k * sizeof half, &half, sizeof half);
      }
    }
  }
};

// Weights are stored with 128 added, because the processors' instruction multiplies unsigned with
// signed bytes; `start` takes 128 times the sum of x away again.
struct Int8 {
  static constexpr int64_t kNumbers = 1;
  static constexpr bool kGrouped = true;

  static IntVec add(IntVec acc, IntVec x, IntVec w) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && defined(__AVX2__)
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
    // Pairs of 16-bit products: no sum of two leaves 32 bits.
    typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
    typedef uint16_t Unsigned __attribute__((vector_size(kLanes * 4)));
    const Shorts x_even = (Shorts)((Unsigned)x << 8) >> 8, x_odd = (Shorts)x >> 8;
    const Shorts w_even = (Shorts)((Unsigned)w & 0xff), w_odd = (Shorts)((Unsigned)w >> 8);
    return acc + multiply(x_even, w_even) + multiply(x_odd, w_odd);
#endif
  }

  // The sum of the products of each pair of 16-bit lanes.
  template <typename Shorts>
  static IntVec multiply(Shorts x, Shorts w) {
#if defined(__AVX512BW__)
    return (IntVec)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
    return (IntVec)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (IntVec)_mm_madd_epi16((__m128i)x, (__m128i)w);
#else
    const IntVec a = (IntVec)x, b = (IntVec)w;
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
  }

  // Rounds a row group by group. What is not finite makes the group's scale so, never a number.
  template <typename T>
  static void prepare(const T* row, int64_t inputs, int64_t words_, float* words, float* scales,
                      int32_t* start) {
    auto* bytes = reinterpret_cast<int8_t*>(words);
    for (int64_t g = 0; g < words_ / kGroupWords; ++g) {
      const int64_t from = g * kGroup, count = std::min(kGroup, inputs - from);
      float x[kGroup] = {};
      for (int64_t k = 0; k < count; ++k) x[k] = widen(row[from + k]);
      scales[g] = round(x, bytes + from, start + g);
    }
  }

  static float round(const float* x, int8_t* to, int32_t* start) {
    Vec top = {}, poison = {};
    for (int64_t k = 0; k < kGroup; k += kLanes) {
      const Vec v = load(x + k);
      top = maximum(top, maximum(v, -v));
      poison += v * 0.0f;
    }
    const float most = highest(top), scale = most / 127 + sum(poison);
    const float inverse = most > 0 && scale > 0 && std::isfinite(1 / scale) ? 1 / scale : 0;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    int32_t total = 0;
    for (int64_t k = 0; k < kGroup; ++k) {
      const float shifted = x[k] * inverse + shift;
      int32_t rounded;
      std::memcpy(&rounded, &shifted, sizeof rounded);
      to[k] = static_cast<int8_t>(rounded - 0x4b400000);
      total += to[k];
    }
    *start = -128 * total;
    return scale;
  }
};

// Asks for two lines of the weights.
inline void fetch(const float* lines) {
  __builtin_prefetch(lines);
  __builtin_prefetch(lines + 16);
}

// c = (add ? c : 0) + x w for kRows rows and one panel, in floats.
template <typename Op, int kRows>
void multiply(const Part& p) {
  for (int64_t column = 0; column < kPanel; column += kColumns) {
    Vec acc[kRows][2];
    clear(acc);
    const float* x = p.x;
    const float* w = p.w + column;
    const float* ahead = p.ahead;
    for (int64_t u = 0; u < p.words; ++u, x += Op::kNumbers * kRows, w += kPanel) {
      fetch(ahead);
      ahead += p.ahead_step;
      const Vec left = load(w), right = load(w + kLanes);
      for (int i = 0; i < kRows; ++i) {
        acc[i][0] = Op::add(acc[i][0], x + i, kRows, left);
        acc[i][1] = Op::add(acc[i][1], x + i, kRows, right);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      float* c = p.c + i * kPanel + column;
      store(c, p.add ? load(c) + acc[i][0] : acc[i][0]);
      store(c + kLanes, p.add ? load(c + kLanes) + acc[i][1] : acc[i][1]);
    }
  }
}

// The same for 8-bit integers: a group's sum is an integer, and is scaled when it is complete.
template <typename Op, int kRows>
void multiply_groups(const Part& p) {
  if (!p.add) std::fill(p.c, p.c + kRows * kPanel, 0.0f);
  for (int64_t column = 0; column < kPanel; column += kColumns) {
    for (int64_t g = 0; g < p.words / kGroupWords; ++g) {
      IntVec acc[kRows][2];
      for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = splat(p.start[g * kRows + i]);
      const float* x = p.x + g * kGroupWords * kRows;
      const float* w = p.w + g * kGroupWords * kPanel + column;
      const float* ahead = p.ahead + g * kGroupWords * p.ahead_step;
      for (int u = 0; u < kGroupWords; ++u, x += kRows, w += kPanel) {
        fetch(ahead);
        ahead += p.ahead_step;
        const IntVec left = bits(load(w)), right = bits(load(w + kLanes));
        for (int i = 0; i < kRows; ++i) {
          const IntVec value = bits(splat_word(x + i));
          acc[i][0] = Op::add(acc[i][0], value, left);
          acc[i][1] = Op::add(acc[i][1], value, right);
        }
      }
      const float* scale = p.w_scale + g * kPanel + column;
      for (int i = 0; i < kRows; ++i) {
        const Vec by = splat(p.x_scale[g * kRows + i]);
        float* c = p.c + i * kPanel + column;
        const Vec left = __builtin_convertvector(acc[i][0], Vec);
        const Vec right = __builtin_convertvector(acc[i][1], Vec);
        store(c, load(c) + left * (by * load(scale)));
        store(c + kLanes, load(c + kLanes) + right * (by * load(scale + kLanes)));
      }
    }
  }
}

template <typename Op, int kRows = kTile>
void multiply_rows(int64_t rows, const Part& part) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return multiply_rows<Op, kRows - 1>(rows, part);
    if constexpr (Op::kGrouped) {
      multiply_groups<Op, kRows>(part);
    } else {
      multiply<Op, kRows>(part);
    }
  }
}

template <typename Op, typename T>
struct Product {
  int64_t K, N, U, G;
  const T* x;
  const float* w;       // [P, U, kPanel] words
  const float* scales;  // [P, G, kPanel]
  T* y;

  // Makes the rows of one tile ready: each number of all rows, then the next.
  void prepare(const Rows& rows, int64_t first_row, int64_t tile, float* line) const {
    const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
    float* scale_line = line + numbers();
    auto* start_line = reinterpret_cast<int32_t*>(scale_line + G);
    for (int64_t i = 0; i < count; ++i) {
      Op::prepare(x + (first_row + first + i) * K, K, U, line, scale_line, start_line);
      float* values = rows.values + first * numbers() + i;
      for (int64_t n = 0; n < numbers(); ++n) values[n * count] = line[n];
      float* scale = rows.scales + first * G + i;
      int32_t* start = rows.start + first * G + i;
      for (int64_t g = 0; g < G; ++g) {
        scale[g * count] = scale_line[g];
        start[g * count] = start_line[g];
      }
    }
  }

  int64_t numbers() const { return U * Op::kNumbers; }
  int64_t line_floats() const { return numbers() + 2 * G; }

  // One block of words of one panel for the tiles [from, to); c is [rows, kPanel].
  void block(const Rows& rows, int64_t from, int64_t to, int64_t panel, int64_t word,
             const float* next, float* c) const {
    const int64_t group = word / kGroupWords;
    Part part;
    part.words = std::min(kBlock, U - word);
    part.w = w + (panel * U + word) * kPanel;
    part.w_scale = scales + (panel * G + group) * kPanel;
    part.add = word > 0;
    const int64_t sharing = std::min(to - from, kSharing);
    part.ahead_step = kPanel / sharing;
    for (int64_t tile = from; tile < to; ++tile) {
      part.ahead = next + (tile - from) * kBlock * part.ahead_step;
      if (tile - from == kSharing) part.ahead_step = 0;
      const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
      part.x = rows.values + first * numbers() + word * Op::kNumbers * count;
      part.x_scale = rows.scales + first * G + group * count;
      part.start = rows.start + first * G + group * count;
      part.c = c + (first - rows.first(from)) * kPanel;
      multiply_rows<Op>(count, part);
    }
  }

  void write(const float* c, int64_t row, int64_t count, int64_t panel) const {
    const int64_t column = panel * kPanel, width = std::min(kPanel, N - column);
    for (int64_t i = 0; i < count; ++i) {
      T* to = y + (row + i) * N + column;
      for (int64_t j = 0; j < width; ++j) narrow(c[i * kPanel + j], to + j);
    }
  }

  // Where the block lies that `task` multiplies next.
  const float* after(int64_t panel, int64_t at_once, int64_t p, int64_t word) const {
    if (p + 1 < at_once) return w + ((panel + p + 1) * U + word) * kPanel;
    if (word + kBlock < U) return w + (panel * U + word + kBlock) * kPanel;
    return w + (panel + at_once) * U * kPanel;
  }

  // Some panels for the tiles [from, to). A few rows read each panel from end to end, as memory
  // likes it; many rows go block by block, so that the block of x stays in the second cache.
  void task(const Rows& rows, int64_t first_row, int64_t from, int64_t to, int64_t panel,
            int64_t end) const {
    const int64_t row = rows.first(from), count = rows.first(to) - row;
    const int64_t at_once = count <= 2 * kTile ? 1 : end - panel;
    Arena& arena = Arena::of_this_thread();
    arena.start(at_once * count * kPanel);
    float* c = arena.take(at_once * count * kPanel);
    for (; panel < end; panel += at_once) {
      for (int64_t word = 0; word < U; word += kBlock) {
        for (int64_t p = 0; p < at_once; ++p) {
          block(rows, from, to, panel + p, word, after(panel, at_once, p, word),
                c + p * count * kPanel);
        }
      }
      for (int64_t p = 0; p < at_once; ++p) {
        write(c + p * count * kPanel, first_row + row, count, panel + p);
      }
    }
  }

  int64_t panels() const { return (N + kPanel - 1) / kPanel; }
};

// Products of the same x with several weights, which share preparing x and the threads.
template <typename Op, typename T>
void pass(ffi::ThreadPool& pool, const std::vector<Product<Op, T>>& products, int64_t first_row,
          int64_t count) {
  const Product<Op, T>& any = products.front();
  static thread_local Arena prepared;
  Rows rows(count, any.numbers(), any.G);
  prepared.start(rows.floats());
  rows.take(prepared);
  const auto ready = [&](int64_t tile) {
    Arena& arena = Arena::of_this_thread();
    arena.start(any.line_floats());
    any.prepare(rows, first_row, tile, arena.take(any.line_floats()));
  };
  if (rows.tiles <= 4) {
    for (int64_t tile = 0; tile < rows.tiles; ++tile) ready(tile);
  } else {
    share_rows(pool, count, rows.tiles, ready);
  }
  int64_t panels = 0;
  for (const auto& product : products) panels += product.panels();
  const int64_t tiles = std::min(rows.tiles, kRowBlock / kTile);
  const int64_t blocks = (rows.tiles + tiles - 1) / tiles;
  const int64_t wanted = panels * blocks / (4 * std::max<int64_t>(pool.num_threads(), 1));
  const int64_t width = std::clamp<int64_t>(wanted, 1, kPanels);
  struct Task {
    const Product<Op, T>* product;
    int64_t from, panel;
  };
  static thread_local std::vector<Task> tasks;
  tasks.clear();
  for (const auto& product : products) {
    for (int64_t from = 0; from < rows.tiles; from += tiles) {
      for (int64_t panel = 0; panel < product.panels(); panel += width) {
        tasks.push_back({&product, from, panel});
      }
    }
  }
  const Task* list = tasks.data();  // of this thread, whoever runs the tasks
  share_rows(pool, count, static_cast<int64_t>(tasks.size()), [&, list](int64_t index) {
    const Task& t = list[index];
    t.product->task(rows, first_row, t.from, std::min(t.from + tiles, rows.tiles), t.panel,
                    std::min(t.panel + width, t.product->panels()));
  });
}

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

// What a call is given: x, then for every weight its values, its scales and which layer it is.
struct Call {
  ffi::ThreadPool& pool;
  ffi::AnyBuffer& x;
  ffi::RemainingArgs& weights;
  ffi::RemainingRets& results;
};

template <typename Op, typename T>
ffi::Error run(const Call& call) {
  const int64_t M = call.x.dimensions()[0], K = call.x.dimensions()[1];
  std::vector<Product<Op, T>> products;
  for (size_t i = 0; i < call.results.size(); ++i) {
    const auto values = call.weights.get<ffi::AnyBuffer>(3 * i);
    const auto scales = call.weights.get<Floats>(3 * i + 1);
    const auto layers = call.weights.get<Ints>(3 * i + 2);
    auto y = call.results.get<ffi::AnyBuffer>(i);
    if (!values || !scales || !layers || !y) {
      return ffi::Error::InvalidArgument("a weight is values, float32 scales and an int32 layer");
    }
    const auto sizes = values->dimensions();
    const int64_t P = sizes[1], U = sizes[2], G = Op::kGrouped ? U / kGroupWords : 0;
    const int64_t layer = std::clamp<int64_t>(layers->typed_data()[0], 0, sizes[0] - 1);
    products.push_back({K, (*y)->dimensions()[1], U, G,
                        static_cast<const T*>(call.x.untyped_data()),
                        static_cast<const float*>(values->untyped_data()) + layer * P * U * kPanel,
                        scales->typed_data() + layer * P * G * kPanel,
                        static_cast<T*>((*y)->untyped_data())});
  }
  for (int64_t row = 0; row < M; row += kPass) {
    pass(call.pool, products, row, std::min(kPass, M - row));
  }
  return ffi::Error::Success();
}

template <typename Op>
ffi::Error run(const Call& call) {
  return call.x.element_type() == ffi::F32 ? run<Op, float>(call) : run<Op, Half>(call);
}

ffi::Error linear_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                       ffi::RemainingRets results) {
  const Call call{pool, x, weights, results};
  const auto first = weights.get<ffi::AnyBuffer>(0);
  if (!first) return ffi::Error::InvalidArgument("a product takes a weight");
  const auto stored = first->element_type();
  return stored == ffi::F32    ? run<Float32>(call)
         : stored == ffi::BF16 ? run<BFloat16>(call)
                               : run<Int8>(call);
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_linear, fornax::linear_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets());
