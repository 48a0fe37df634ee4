// The order of tokens' rows by expert, and what native products of experts do with lines.

#ifndef FORNAX_KERNELS_EXPERT_ROWS_H_
#define FORNAX_KERNELS_EXPERT_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "crew.h"

namespace fornax {

// Rows in the order of their groups, [A] each: which comes at each place, and at which place each
// comes. Rows of no group are last.
inline void order_rows(const int32_t* groups, int64_t A, int64_t E, int32_t* order,
                       int32_t* inverse, int32_t* sizes) {
  const auto group = [&](int64_t row) {
    return groups[row] < 0 || groups[row] >= E ? E : groups[row];
  };
  std::vector<int32_t> place(E + 2);
  for (int64_t row = 0; row < A; ++row) ++place[group(row) + 1];
  std::copy_n(place.begin() + 1, E, sizes);
  for (int64_t e = 0; e <= E; ++e) place[e + 1] += place[e];
  for (int64_t row = 0; row < A; ++row) {
    const int32_t at = place[group(row)]++;
    inverse[row] = at;
    order[at] = static_cast<int32_t>(row);
  }
}

// Where each group's rows begin, and where the last one's end: never beyond M.
inline std::vector<int64_t> edges(const int32_t* sizes, int64_t E, int64_t M) {
  std::vector<int64_t> found(1, 0);
  for (int64_t e = 0; e < E; ++e) {
    found.push_back(std::min(M, found.back() + std::max<int64_t>(sizes[e], 0)));
  }
  return found;
}

inline void add_line(float* line, const float* bias, int64_t count) {
  for (int64_t j = 0; j < count; ++j) line[j] += bias[j];
}

// y [M, D] = the sum of each token's `k` outputs, weighted unless there are no weights. Outputs [., D] lie
// in the order of experts, `inverse` says where; what lies at `end` or beyond is of no expert.
inline void sum_outputs(ffi::ThreadPool& pool, int64_t M, int64_t k, int64_t D,
                        const int32_t* inverse, int64_t end, const float* outputs,
                        const float* weights, float* y) {
  share_evenly(pool, M, M * k * D, [&](int64_t from, int64_t to) {
    for (int64_t m = from; m < to; ++m) {
      float* line = y + m * D;
      std::fill_n(line, D, 0.0f);
      for (int64_t a = m * k; a < (m + 1) * k; ++a) {
        if (inverse[a] >= end) continue;
        const float* output = outputs + inverse[a] * D;
        const float weight = weights ? weights[a] : 1.0f;
        for (int64_t j = 0; j < D; ++j) line[j] += weight * output[j];
      }
    }
  });
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_EXPERT_ROWS_H_
