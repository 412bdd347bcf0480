// Run: an owning array that can give up its front or its back.
//
//   base            base + off                    base + off + len        base + cap
//   |   given away  |           what lives here          |     given away     |
//
// Giving a part away copies the smaller half only. A Run less than half full is made smaller, so it never holds more
// than twice what lives in it, plus kSlack bytes. One that grows keeps a quarter more than it needs for the next time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace mainstem {

template <class T>
class Run {
 public:
  Run() = default;
  Run(const T* source, std::size_t n) : base_(allocate(n)), cap_(narrow(n)), len_(narrow(n)) {
    if (n) std::memcpy(base_, source, n * sizeof(T));
  }
  Run(Run&& other) noexcept { swap(other); }
  Run& operator=(Run&& other) noexcept {
    Run moved(std::move(other));
    swap(moved);
    return *this;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    if (base_) std::free(base_);  // many are empty, and a call costs more than a look
  }

  const T* data() const { return base_ + off_; }
  std::size_t size() const { return len_; }
  std::size_t held() const { return cap_; }  // elements of memory, live or not
  const T& operator[](std::size_t i) const { return base_[off_ + i]; }

  // Room for the smaller part of a cut behind the first n elements, 0 <= n <= size(); with it the cut cannot fail.
  Run room(std::size_t n) const {
    Run empty;
    empty.cap_ = narrow(n <= len_ - n ? n : len_ - n);
    empty.base_ = allocate(empty.cap_);
    return empty;
  }

  // The first n elements leave as a Run of their own.
  Run take_front(std::size_t n, Run room) noexcept {
    const bool front_is_smaller = n <= len_ - n;
    const std::size_t from = front_is_smaller ? 0 : n;
    room.len_ = room.cap_;
    if (room.len_) std::memcpy(room.base_, data() + from, room.len_ * sizeof(T));
    if (front_is_smaller) {
      off_ += narrow(n);
      len_ -= narrow(n);
    } else {
      len_ = narrow(n);
    }
    shrink();
    if (!front_is_smaller) swap(room);  // what is left here must be the back
    return room;
  }

  void drop_back(std::size_t n) {
    len_ -= narrow(n);
    shrink();
  }

  // Room for n more at the back, after which append() cannot fail; at most `limit` elements are held in all.
  void reserve_back(std::size_t n, std::size_t limit) {
    const std::size_t needed = len_ + n;
    if (off_ + needed <= cap_) return;
    Run larger;
    larger.cap_ = narrow(std::max(needed, std::min(needed + needed / 4, limit)));
    larger.base_ = allocate(larger.cap_);
    larger.append(*this);
    swap(larger);
  }
  void append(const Run& back) noexcept {
    if (back.len_) std::memcpy(base_ + off_ + len_, back.data(), back.len_ * sizeof(T));
    len_ += back.len_;
  }

 private:
  static constexpr std::size_t kSlack = 64;  // bytes; below this a Run is not worth shrinking

  static T* allocate(std::size_t n) {
    if (n == 0) return nullptr;
    void* memory = std::malloc(n * sizeof(T));
    if (!memory) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  static std::uint32_t narrow(std::size_t n) { return static_cast<std::uint32_t>(n); }

  void swap(Run& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(cap_, other.cap_);
    std::swap(off_, other.off_);
    std::swap(len_, other.len_);
  }

  // Best effort: without memory for the smaller copy the larger one stays.
  void shrink() noexcept {
    if (std::size_t{len_} * 2 >= cap_ || cap_ * sizeof(T) <= kSlack) return;
    T* smaller = len_ ? static_cast<T*>(std::malloc(len_ * sizeof(T))) : nullptr;
    if (len_ && !smaller) return;
    if (len_) std::memcpy(smaller, data(), len_ * sizeof(T));
    std::free(base_);
    base_ = smaller;
    cap_ = len_;
    off_ = 0;
  }

  T* base_ = nullptr;
  std::uint32_t cap_ = 0;
  std::uint32_t off_ = 0;
  std::uint32_t len_ = 0;
};

}  // namespace mainstem
