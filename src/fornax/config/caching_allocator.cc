// An allocator to preload: large aligned blocks that are freed stay mapped for the next request of their size.
//
// XLA takes the memory of a step's temporaries anew in each step, and glibc maps blocks of this size anew from the
// kernel, which zeroes every page again. PyTorch's caching allocators do the same on accelerators. Blocks come from
// posix_memalign and aligned_alloc, as XLA asks; everything else is glibc's. Kept blocks never add to the most that
// was in use at once: where a new block would pass that, those kept the longest go first. malloc_trim gives all back.

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_memalign(size_t, size_t);
void* __libc_realloc(void*, size_t);
void __libc_free(void*);
}

namespace {

constexpr size_t kPage = size_t{1} << 21;  // a huge page of x86-64 and of most arm64
constexpr size_t kLeast = size_t{32} << 20;  // glibc serves less from its heap, once it has met it
constexpr int kMost = 1024;

struct Block {
  char* at;
  size_t size;
  uint64_t freed;  // when, counted in blocks freed; 0 while in use
};

// Not allocated, as this is what allocates. In order of no kind.
Block blocks[kMost];
int count = 0;
size_t used = 0, kept = 0, most_used = 0;  // bytes
uint64_t clock_of_frees = 0;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

struct Lock {
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
};

// A child of fork has one thread, and the mutex must not be another's there.
__attribute__((constructor)) void prepare_for_fork() {
  pthread_atfork([] { pthread_mutex_lock(&mutex); }, [] { pthread_mutex_unlock(&mutex); },
                 [] { pthread_mutex_unlock(&mutex); });
}

bool may_be_block(const void* p) { return reinterpret_cast<uintptr_t>(p) % kPage == 0; }

Block* find(const void* p) {
  Block* end = blocks + count;
  Block* found = std::find_if(blocks, end, [p](const Block& b) { return b.at == p && !b.freed; });
  return found == end ? nullptr : found;
}

void unmap(Block* block) {
  munmap(block->at, block->size);
  kept -= block->size;
  *block = blocks[--count];
}

// The smallest kept block that holds `size` and little more.
Block* reuse(size_t size) {
  Block* best = nullptr;
  for (Block* b = blocks; b != blocks + count; ++b) {
    const bool fits = b->freed && b->size >= size && b->size - size <= size / 8;
    if (fits && (best == nullptr || b->size < best->size)) best = b;
  }
  if (best != nullptr) {
    best->freed = 0;
    kept -= best->size;
    used += best->size;
  }
  return best;
}

char* map(size_t size) {
  void* all = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(all);
  const size_t before = -reinterpret_cast<uintptr_t>(start) % kPage;
  if (before) munmap(start, before);
  if (before < kPage) munmap(start + before + size, kPage - before);
  madvise(start + before, size, MADV_HUGEPAGE);
  return start + before;
}

// Null where it is not for blocks, or there is none: then glibc is asked.
void* take(size_t align, size_t size) {
  if (size < kLeast || align > kPage || size > PTRDIFF_MAX - 2 * kPage) return nullptr;
  const int error = errno;
  const size_t rounded = (size + kPage - 1) / kPage * kPage;
  const Lock lock;
  if (Block* block = reuse(rounded)) return block->at;
  const size_t limit = std::max(most_used, used + rounded);
  while (kept > 0 && (used + kept + rounded > limit || count == kMost)) {
    Block* oldest = nullptr;
    for (Block* b = blocks; b != blocks + count; ++b) {
      if (b->freed && (oldest == nullptr || b->freed < oldest->freed)) oldest = b;
    }
    unmap(oldest);
  }
  char* at = count < kMost ? map(rounded) : nullptr;
  errno = error;
  if (at == nullptr) return nullptr;
  blocks[count++] = {at, rounded, 0};
  used += rounded;
  most_used = std::max(most_used, used);
  return at;
}

bool give(const void* p) {
  const Lock lock;
  Block* block = find(p);
  if (block == nullptr) return false;
  block->freed = ++clock_of_frees;
  used -= block->size;
  kept += block->size;
  return true;
}

size_t size_of(const void* p) {
  const Lock lock;
  const Block* block = find(p);
  return block == nullptr ? 0 : block->size;
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int posix_memalign(void** to, size_t align, size_t size) noexcept {
  if (align % sizeof(void*) || align == 0 || (align & (align - 1))) return EINVAL;
  void* p = take(align, size);
  if (p == nullptr) p = __libc_memalign(align, size);
  if (p == nullptr) return ENOMEM;
  *to = p;
  return 0;
}

void* aligned_alloc(size_t align, size_t size) noexcept {
  void* p = align && !(align & (align - 1)) ? take(align, size) : nullptr;
  return p != nullptr ? p : __libc_memalign(align, size);
}

void free(void* p) noexcept {
  if (p == nullptr || (may_be_block(p) && give(p))) return;
  __libc_free(p);
}

void* realloc(void* p, size_t size) noexcept {
  const size_t before = p != nullptr && may_be_block(p) ? size_of(p) : 0;
  if (before == 0) return __libc_realloc(p, size);
  void* to = size != 0 ? __libc_malloc(size) : nullptr;
  if (to != nullptr) std::memcpy(to, p, std::min(before, size));
  if (to != nullptr || size == 0) free(p);
  return to;
}

size_t malloc_usable_size(void* p) noexcept {
  const size_t size = p != nullptr && may_be_block(p) ? size_of(p) : 0;
  if (size != 0) return size;
  static const auto of_glibc = next<size_t (*)(void*)>("malloc_usable_size");
  return of_glibc(p);
}

int malloc_trim(size_t pad) noexcept {
  {
    const Lock lock;
    for (Block* b = blocks; b != blocks + count;) b->freed ? unmap(b) : void(++b);
    most_used = used;
  }
  static const auto of_glibc = next<int (*)(size_t)>("malloc_trim");
  return of_glibc(pad);
}

}  // extern "C"
#pragma GCC visibility pop
