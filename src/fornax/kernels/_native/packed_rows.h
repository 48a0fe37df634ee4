// Products of prepared rows with one packed matrix: what packed linear maps and experts share.
//
// Letters: M rows, K inputs, N outputs, P panels of 32 outputs, U words of inputs, G groups of inputs.
// A matrix is [P, U, 32] words, its scales and zeros [P, G, 32]. Of blocks (block_product.h) a word is a
// record, with the scales in it, and G counts the groups of x.
//
// Every output is summed in one order, blocks of words one after the other, whatever the number of
// rows and threads: a row's result does not depend on what else is in the batch.

#ifndef FORNAX_KERNELS_PACKED_ROWS_H_
#define FORNAX_KERNELS_PACKED_ROWS_H_

#include <algorithm>

#include "block_product.h"

namespace fornax {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 12;  // rows whose sums fill the registers
#else
constexpr int kTile = 6;
#endif
constexpr int64_t kRowBlock = 240;   // rows of a task: a block of them fits the second cache
constexpr int64_t kPanels = 8;       // most panels of a task
constexpr int64_t kSharing = 4;      // most tiles that share the fetching of the next block

// Rows of x, made ready for the product: tiles of up to kTile rows, each [numbers, rows], of which a
// word of weights takes one or several.
struct Rows {
  int64_t count, numbers, groups, tiles;  // groups: 0 where x is not rounded to integers
  float* values;                          // [tiles][numbers, rows]
  float* scales;                          // [tiles][groups, rows]
  float* totals;                          // [tiles][groups, rows]: sums of a group's integers

  Rows(int64_t count, int64_t numbers, int64_t groups)
      : count(count), numbers(numbers), groups(groups), tiles((count + kTile - 1) / kTile) {}

  // Rows are spread evenly, so that no tile is much smaller than the others.
  int64_t first(int64_t tile) const { return count * tile / tiles; }

  int64_t floats() const { return count * (numbers + 2 * groups) + 3 * kLanes; }

  void take(Arena& arena) {
    values = arena.take(round_up(count * numbers, kLanes));
    scales = arena.take(round_up(count * groups, kLanes));
    totals = arena.take(round_up(count * groups, kLanes));
  }

  // Puts a line among the others of its tile.
  void put(const Line& line, int64_t tile, int64_t i) const {
    const int64_t from = first(tile), height = first(tile + 1) - from;
    float* number = values + from * numbers + i;
    for (int64_t n = 0; n < numbers; ++n) number[n * height] = line.numbers[n];
    float* scale = scales + from * groups + i;
    float* total = totals + from * groups + i;
    for (int64_t g = 0; g < groups; ++g) {
      scale[g * height] = line.scales[g];
      total[g * height] = line.totals[g];
    }
  }
};

template <typename Op, int kRows = kTile>
void multiply_rows(int64_t rows, const Part& part) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return multiply_rows<Op, kRows - 1>(rows, part);
    if constexpr (Op::kBlocks) {
      multiply_blocks<Op, kRows>(part);
    } else if constexpr (Op::kGrouped) {
      multiply_groups<Op, kRows>(part);
    } else {
      multiply<Op, kRows>(part);
    }
  }
}

template <typename Op>
struct Matrix {
  int64_t K, N, U, G;
  const float* w;        // [P, U] words of a panel, Op::kStride apart
  const char* scales;    // [P, G, kPanel] Op::Scale
  const uint8_t* zeros;  // [P, G, kPanel]

  int64_t panels() const { return (N + kPanel - 1) / kPanel; }

  // Words of a group.
  int64_t group() const { return G > 0 ? U / G : U; }

  // Where a panel lies, from a word on.
  const float* panel(int64_t index, int64_t word = 0) const {
    return w + (index * U + word) * Op::kStride;
  }

  // What `count` rows of x become.
  Rows rows(int64_t count) const { return Rows(count, U * Op::kNumbers, Op::kRounded ? G : 0); }

  int64_t line_floats() const { return U * Op::kNumbers + (Op::kRounded ? 2 * G : 0); }

  // A line of so many floats.
  Line line(float* at) const {
    const int64_t numbers = U * Op::kNumbers;
    return {at, at + numbers, at + numbers + (Op::kRounded ? G : 0)};
  }

  template <typename T>
  void prepare(const T* row, const Line& line) const {
    Op::prepare(row, K, U, group(), line);
  }

  // One block of words of one panel for the tiles [from, to); c is [rows, kPanel].
  void block(const Rows& rows, int64_t from, int64_t to, int64_t panel, int64_t word,
             const float* next, float* c) const {
    const int64_t g = G * word / U;
    Part part;
    part.words = std::min(Op::kBlock, U - word);
    part.w = this->panel(panel, word);
    if constexpr (!Op::kBlocks) {
      const int64_t at = (panel * G + g) * kPanel;
      part.group = group();
      part.w_scale = scales + at * sizeof(typename Op::Scale);
      part.w_zero = zeros + at;
    }
    part.add = word > 0;
    const int64_t sharing = std::min(to - from, kSharing);
    part.ahead_step = Op::kStride / sharing;
    for (int64_t tile = from; tile < to; ++tile) {
      part.ahead = next + (tile - from) * Op::kBlock * part.ahead_step;
      if (tile - from == kSharing) part.ahead_step = 0;
      const int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
      part.x = rows.values + first * rows.numbers + word * Op::kNumbers * count;
      part.x_scale = rows.scales + first * rows.groups + g * count;
      part.x_total = rows.totals + first * rows.groups + g * count;
      part.c = c + (first - rows.first(from)) * kPanel;
      multiply_rows<Op>(count, part);
    }
  }

  template <typename T>
  void write(const float* c, int64_t count, int64_t panel, T* y) const {
    const int64_t column = panel * kPanel, width = std::min(kPanel, N - column);
    for (int64_t i = 0; i < count; ++i) {
      T* to = y + i * N + column;
      for (int64_t j = 0; j < width; ++j) narrow(c[i * kPanel + j], to + j);
    }
  }

  // The panels [panel, end) for the tiles [from, to); y [rows, N] is where the row of the first tile
  // goes, `next` what the thread is likely to read after this. A few rows read each panel from end to
  // end, as memory likes it; many rows go block by block, so that the block of x stays in the second
  // cache.
  template <typename T>
  void run(const Rows& rows, int64_t from, int64_t to, int64_t panel, int64_t end,
           const float* next, T* y) const {
    const int64_t count = rows.first(to) - rows.first(from);
    const int64_t at_once = count <= 2 * kTile ? 1 : end - panel;
    Arena& arena = Arena::of_this_thread();
    arena.start(at_once * count * kPanel);
    float* c = arena.take(at_once * count * kPanel);
    for (; panel < end; panel += at_once) {
      const float* later = panel + at_once < end ? this->panel(panel + at_once) : next;
      for (int64_t word = 0; word < U; word += Op::kBlock) {
        for (int64_t p = 0; p < at_once; ++p) {
          const float* ahead = p + 1 < at_once         ? this->panel(panel + p + 1, word)
                               : word + Op::kBlock < U ? this->panel(panel, word + Op::kBlock)
                                                       : later;
          block(rows, from, to, panel + p, word, ahead, c + p * count * kPanel);
        }
      }
      for (int64_t p = 0; p < at_once; ++p) write(c + p * count * kPanel, count, panel + p, y);
    }
  }
};

// Panels of a task, so that there are some for each thread.
inline int64_t panels_of_task(int64_t panels, int64_t threads) {
  return std::clamp<int64_t>(panels / (4 * std::max<int64_t>(threads, 1)), 1, kPanels);
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_PACKED_ROWS_H_
