// What the operations on states in slots share: where a batch's sequences lie, and which slots they read and write.
//
// Letters: T tokens, U sequences, A slots, J slots that a sequence writes.

#ifndef FORNAX_KERNELS_SLOTS_H_
#define FORNAX_KERNELS_SLOTS_H_

#include <algorithm>

#include "crew.h"

namespace fornax {

using Ints = ffi::Buffer<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;

// Where the sequences of a batch lie, and which slots their states come from and go to.
struct Rows {
  const int32_t *starts, *slots, *kept;
  const bool* fresh;
  int64_t T, U, A, J;

  int64_t begin(int64_t u) const { return std::clamp<int64_t>(starts[u], 0, T); }
  int64_t count(int64_t u) const { return std::clamp<int64_t>(starts[u + 1], 0, T) - begin(u); }

  // The slot that takes the state after the j-th token of sequence u; -1 for none.
  int64_t kept_after(int64_t u, int64_t j) const {
    const bool few = count(u) <= J;
    if (!few && j + 1 < count(u)) return -1;
    const int64_t slot = kept[u * J + (few ? j : 0)];
    return slot >= 0 && slot < A ? slot : -1;
  }

  // The slot that sequence u goes on from; -1 where it begins, or has no token.
  int64_t before(int64_t u) const {
    return count(u) <= 0 || fresh[u] ? -1 : std::clamp<int64_t>(slots[u], 0, A - 1);
  }

  int64_t tokens() const { return std::clamp<int64_t>(starts[U], 0, T); }
};

inline Rows rows_of(int64_t T, int64_t A, const Ints& starts, const Ints& slots, const Ints& kept,
             const Flags& fresh) {
  return {starts.typed_data(), slots.typed_data(), kept.typed_data(), fresh.typed_data(), T,
          static_cast<int64_t>(slots.element_count()), A, kept.dimensions()[1]};
}

// task(0) .. task(count - 1), on several threads where `elements` are worth it.
template <typename Task>
void share_tasks(ffi::ThreadPool& pool, int64_t rows, int64_t elements, int64_t count,
                 const Task& task) {
  if (elements <= kAlone) {
    for (int64_t i = 0; i < count; ++i) task(i);
  } else {
    share_rows(pool, rows, count, task);
  }
}

}  // namespace fornax

#endif  // FORNAX_KERNELS_SLOTS_H_
