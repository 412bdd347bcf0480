// Array: a vector of elements that can be moved as plain bytes. Long arrays, which are read at random, use large pages
// where the system provides them, to save TLB misses. On Linux they grow without a copy: their pages get new addresses,
// so they need little spare room, and never twice the memory while they grow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mainstem {

// The memory that malloc uses, with glibc's header and granularity; other allocators are similar.
inline std::size_t block_bytes(std::size_t bytes) {
  return bytes ? std::max<std::size_t>(32, (bytes + 8 + 15) / 16 * 16) : 0;
}

namespace memory {

#ifdef __linux__
inline constexpr std::size_t kSpare = 32;                         // spare room: one part in this many
inline constexpr std::size_t kLargePage = std::size_t{2} << 20;   // bytes
inline constexpr std::size_t kMany = 4 * kLargePage;              // below this, large pages are not worth it
inline constexpr std::size_t kLong = kLargePage / 2;              // below this, memory comes from malloc
inline constexpr std::size_t kSmallPage = std::size_t{64} << 10;  // a whole number of pages on any system

inline std::size_t rounded(std::size_t bytes) {
  return (bytes + kSmallPage - 1) / kSmallPage * kSmallPage;
}

inline char* granted(void* memory) {
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(memory);
}
// Maps addresses that start at a large page.
inline char* map(std::size_t bytes, int protection) {
  const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* const begin = granted(mmap(nullptr, bytes + kLargePage, protection, kind, -1, 0));
  const std::size_t before = -reinterpret_cast<std::size_t>(begin) % kLargePage;
  if (before) munmap(begin, before);
  munmap(begin + before + bytes, kLargePage - before);
  return begin + before;
}
inline void* allocate(std::size_t bytes) {
  if (bytes < kLong) return std::malloc(bytes);
  void* const memory = map(rounded(bytes), PROT_READ | PROT_WRITE);
  if (bytes >= kMany) madvise(memory, rounded(bytes), MADV_HUGEPAGE);  // a failure is harmless
  return memory;
}
inline void release(void* memory, std::size_t bytes) noexcept {
  if (bytes < kLong)
    std::free(memory);
  else
    munmap(memory, rounded(bytes));
}
// Extends long memory. If that fails, does not unmap `place`: another thread may have it by now.
inline void* extend(void* memory, std::size_t bytes, std::size_t more) {
  char* const place = map(rounded(more), PROT_NONE);
  granted(mremap(memory, rounded(bytes), rounded(more), MREMAP_MAYMOVE | MREMAP_FIXED, place));
  if (more >= kMany) madvise(place, rounded(more), MADV_HUGEPAGE);
  return place;
}
#else
inline constexpr std::size_t kSpare = 4;

inline void* allocate(std::size_t bytes) {
  return std::malloc(bytes);
}
inline void release(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#endif

// Enlarges memory from `bytes` to `more` bytes and keeps its contents.
inline void* grow(void* memory, std::size_t bytes, std::size_t more) {
#ifdef __linux__
  if (bytes >= kLong) return extend(memory, bytes, more);
#endif
  void* const larger = allocate(more);
  if (!larger) throw std::bad_alloc();
  if (bytes) std::memcpy(larger, memory, bytes);
  release(memory, bytes);
  return larger;
}

}  // namespace memory

// Returns the capacity to allocate for `needed` elements: short arrays are copied when they grow.
inline std::size_t with_spare(std::size_t needed) {
  return needed + needed / (needed < (1u << 12) ? 2 : needed < (1u << 16) ? 4 : memory::kSpare);
}

template <class T>
class Array {
 public:
  Array() = default;
  Array(Array&& other) noexcept { swap(other); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    std::destroy_n(data_, size_);
    memory::release(data_, bytes());
  }

  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& back() { return data_[size_ - 1]; }
  const T& front() const { return data_[0]; }
  const T& back() const { return data_[size_ - 1]; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::size_t capacity() const { return capacity_; }
  std::size_t bytes() const { return capacity_ * sizeof(T); }

  void reserve(std::size_t n) {
    if (n <= capacity_) return;
    data_ = static_cast<T*>(memory::grow(data_, bytes(), n * sizeof(T)));
    capacity_ = n;
  }
  void resize(std::size_t n, const T& value) {
    reserve(n);
    while (size_ < n)
      new (data_ + size_++) T(value);
  }
  void resize(std::size_t n) {
    reserve(n);
    while (size_ < n)
      new (data_ + size_++) T();
  }
  void push_back(T value) {
    if (size_ == capacity_) reserve(with_spare(size_ + 1));
    new (data_ + size_++) T(std::move(value));
  }
  void pop_back() { data_[--size_].~T(); }
  void swap(Array& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace mainstem
