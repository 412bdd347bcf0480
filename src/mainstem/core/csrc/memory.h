// LargePages: an allocator for long arrays that are read at random. On Linux they lie in large pages where the system
// gives any, so that fewer of their addresses must be looked up in memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mainstem {

template <class T>
struct LargePages {
  using value_type = T;
  static constexpr std::size_t kPage = std::size_t{2} << 20;  // bytes
  static constexpr std::size_t kLong = 4 * kPage;             // below this it is not worth it

  bool operator==(const LargePages&) const = default;

  T* allocate(std::size_t n) {
    const std::size_t bytes = n * sizeof(T);
    void* memory = bytes < kLong ? std::malloc(bytes) : std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
    if (!memory) throw std::bad_alloc();
#ifdef __linux__
    if (bytes >= kLong) madvise(memory, bytes, MADV_HUGEPAGE);  // refused, it changes nothing
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) noexcept { std::free(memory); }
};

}  // namespace mainstem
