// Run: an owning array that can give up its front or its back.
//
//   data - off              data                   data + len         data - off + cap
//   |   given away          |   elements           |   given away     |
//
// A few elements are stored in the Run itself: most nodes are short, and malloc uses at least 32 bytes.
//
// Giving a part away copies the smaller half only. A Run less than half full is shrunk, so it never holds more than
// twice its elements, plus kSlack bytes. A Run that grows keeps a quarter more than it needs for the next time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "structure/memory.h"

namespace mainstem {

template <class T>
class Run {
  struct Far {
    T* data;
    std::uint32_t cap, off;
  };
  static constexpr std::size_t kInside = sizeof(Far) / sizeof(T);  // elements; more of them use memory of their own
  static constexpr std::size_t kSlack = 64;                        // bytes; below this a Run is not worth shrinking

 public:
  // Memory for a split or a join, so that neither can fail.
  class Room {
   public:
    Room() = default;
    explicit Room(std::size_t n) {
      if (n <= kInside) return;
      memory_ = static_cast<T*>(std::malloc(n * sizeof(T)));
      if (!memory_) throw std::bad_alloc();
      cap_ = narrow(n);
    }
    Room(Room&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), cap_(other.cap_) {}
    Room& operator=(Room&& other) noexcept {
      std::swap(memory_, other.memory_);
      std::swap(cap_, other.cap_);
      return *this;
    }
    ~Room() { std::free(memory_); }

   private:
    friend class Run;
    Far give() { return {std::exchange(memory_, nullptr), cap_, 0}; }
    T* memory_ = nullptr;
    std::uint32_t cap_ = 0;
  };

  Run() = default;
  Run(const T* source, std::size_t n) : Run(source, n, Room(n)) {}
  Run(Run&& other) noexcept : at_(other.at_), len_(std::exchange(other.len_, 0)) {}
  Run& operator=(Run&& other) noexcept {
    if (this == &other) return *this;
    if (!inside()) std::free(base());
    at_ = other.at_;
    len_ = std::exchange(other.len_, 0);
    return *this;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    if (!inside()) std::free(base());
  }

  const T* data() const { return inside() ? at_.inside : at_.far.data; }
  std::size_t size() const { return len_; }
  std::size_t heap_bytes() const { return inside() ? 0 : block_bytes(at_.far.cap * sizeof(T)); }
  const T& operator[](std::size_t i) const { return data()[i]; }

  // Allocates room to split after the first n elements, 0 <= n <= size().
  Room room(std::size_t n) const { return Room(std::min(n, len_ - n)); }

  // Moves the first n elements into a Run of their own.
  Run take_front(std::size_t n, Room room) noexcept {
    const bool front_is_smaller = n <= len_ - n;
    Run smaller(data() + (front_is_smaller ? 0 : n), std::min(n, len_ - n), std::move(room));
    keep(front_is_smaller ? n : 0, len_ - smaller.len_);
    if (!front_is_smaller) swap(smaller);  // the back must stay here
    return smaller;
  }

  void drop_back(std::size_t n) noexcept { keep(0, len_ - n); }

  // Allocates room to append n; at most `limit` elements in all.
  Room room_after(std::size_t n, std::size_t limit) const {
    const std::size_t needed = len_ + n;
    if (needed <= kInside || (!inside() && at_.far.off + needed <= at_.far.cap)) return {};
    return Room(std::max(needed, std::min(needed + needed / 4, limit)));
  }
  void append(const Run& back, Room room) noexcept {
    const std::size_t len = len_ + back.len_;
    if (room.memory_) {
      copy(room.memory_, data(), len_);
      if (!inside()) std::free(base());
      at_.far = room.give();
    }
    copy((len <= kInside ? at_.inside : at_.far.data) + len_, back.data(), back.len_);
    len_ = narrow(len);
  }

 private:
  Run(const T* source, std::size_t n, Room room) noexcept : len_(narrow(n)) {
    if (!inside()) at_.far = room.give();
    copy(inside() ? at_.inside : at_.far.data, source, n);
  }

  static void copy(T* to, const T* from, std::size_t n) {
    if (n) std::memcpy(to, from, n * sizeof(T));
  }
  static std::uint32_t narrow(std::size_t n) { return static_cast<std::uint32_t>(n); }
  bool inside() const { return len_ <= kInside; }
  T* base() const { return at_.far.data - at_.far.off; }

  void swap(Run& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(len_, other.len_);
  }

  // Elements [from, from + n) stay.
  void keep(std::size_t from, std::size_t n) noexcept {
    if (inside()) {
      std::memmove(at_.inside, at_.inside + from, n * sizeof(T));
      len_ = narrow(n);
      return;
    }
    at_.far.data += from;
    at_.far.off += narrow(from);
    len_ = narrow(n);
    shrink();
  }
  // Best effort: without memory for the smaller copy the larger one stays, unless the elements fit inside.
  void shrink() noexcept {
    const Far far = at_.far;
    T* smaller = at_.inside;
    if (!inside()) {
      if (std::size_t{len_} * 2 >= far.cap || far.cap * sizeof(T) <= kSlack) return;
      smaller = static_cast<T*>(std::malloc(len_ * sizeof(T)));
      if (!smaller) return;
    }
    copy(smaller, far.data, len_);
    std::free(far.data - far.off);
    if (!inside()) at_.far = {smaller, len_, 0};
  }

  union {
    Far far;
    T inside[kInside];
  } at_{};
  std::uint32_t len_ = 0;
};

}  // namespace mainstem
