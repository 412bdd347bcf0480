// ChildTable: finds the child of a node that begins with a given page. One open-addressing table for the whole tree.
// A slot holds 32 bits of the hash, and the child; parent and page are then compared in the node itself. Roots are in
// the table, too: they have no parent and are found by the name of their namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

// Multiply-and-fold (the mixing step of wyhash, https://github.com/wangyi-fudan/wyhash, public domain).
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t load_word(const std::uint8_t* from, std::size_t bytes = 8) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, bytes);
  return word;
}

// Two lanes of 16 bytes each step, so that the multiplications do not wait for each other. The seed is secret, so that
// nobody can construct colliding pages.
inline std::uint64_t page_name(std::uint64_t seed, Index parent, const std::uint8_t* page, std::size_t bytes) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  std::uint64_t one = fold(seed ^ parent, kOdd ^ bytes);
  if (bytes == 4) return fold(one ^ load_word(page, 4), seed ^ kOdd);  // a page of one token
  std::uint64_t two = one ^ kOdd;
  for (; bytes >= 32; bytes -= 32, page += 32) {
    one = fold(load_word(page) ^ seed, load_word(page + 8) ^ one);
    two = fold(load_word(page + 16) ^ seed, load_word(page + 24) ^ two);
  }
  for (; bytes >= 8; bytes -= 8, page += 8)
    one = fold(load_word(page) ^ seed, one ^ kOdd);
  if (bytes) two = fold(load_word(page, bytes) ^ seed, two ^ kOdd);
  return fold(one ^ seed, two ^ kOdd);
}
inline std::uint32_t page_hash(std::uint64_t seed, Index parent, const std::uint8_t* page, std::size_t bytes) {
  const std::uint64_t name = page_name(seed, parent, page, bytes);
  return static_cast<std::uint32_t>(name ^ (name >> 32));
}

class ChildTable {
 public:
  template <class Same>
  Index find(std::uint32_t hash, Same same) const {
    if (slots_.empty()) return kNone;
    for (std::size_t i = home(hash); slots_[i].child != kNone; i = next(i))
      if (slots_[i].hash == hash && same(slots_[i].child)) return slots_[i].child;
    return kNone;
  }

  // Makes room for n more, so that insert() cannot fail for them.
  void reserve(std::size_t n) {
    while ((size_ + n) * 4 > slots_.size() * 3)
      grow();
  }
  void insert(std::uint32_t hash, Index child) noexcept {
    place(hash, child);
    ++size_;
  }
  void replace(std::uint32_t hash, Index child, Index with) { slots_[locate(hash, child)].child = with; }

  void erase(std::uint32_t hash, Index child) {
    std::size_t hole = locate(hash, child);
    // Move entries that were pushed past the hole back, so that no search stops early.
    for (std::size_t i = next(hole); slots_[i].child != kNone; i = next(i)) {
      if (pushed(home(slots_[i].hash), i) >= pushed(hole, i)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].child = kNone;
    --size_;
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return slots_.bytes(); }

 private:
  struct Slot {
    std::uint32_t hash = 0;
    Index child = kNone;
  };

  // The slot of a hash. Slots are in hash order, so that growing fills the larger table from end to end.
  std::size_t home(std::uint32_t hash) const { return std::uint64_t{hash} * slots_.size() >> 32; }
  std::size_t next(std::size_t i) const { return i + 1 == slots_.size() ? 0 : i + 1; }
  std::size_t pushed(std::size_t from, std::size_t to) const { return to - from + (to < from ? slots_.size() : 0); }
  std::size_t locate(std::uint32_t hash, Index child) const {
    std::size_t i = home(hash);
    while (slots_[i].child != child)
      i = next(i);
    return i;
  }
  void place(std::uint32_t hash, Index child) {
    std::size_t i = home(hash);
    while (slots_[i].child != kNone)
      i = next(i);
    slots_[i] = {hash, child};
  }
  void grow() {
    Array<Slot> old;
    old.resize(slots_.empty() ? 16 : slots_.size() + slots_.size() / (slots_.size() < kLarge ? 1 : 4));
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.child != kNone) place(slot.hash, slot.child);
  }

  static constexpr std::size_t kLarge = 1 << 12;  // slots; a larger table grows in smaller steps
  Array<Slot> slots_;
  std::size_t size_ = 0;
};

}  // namespace mainstem
