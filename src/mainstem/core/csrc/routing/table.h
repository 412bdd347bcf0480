// BlockTable: words to blocks, in one open-addressing table. A word is a hash that somebody else chose, so places
// follow from a secret seed.
#pragma once

#include <cassert>
#include <cstdint>

#include "structure/children.h"
#include "structure/memory.h"

namespace mainstem {

using BlockIndex = std::uint32_t;
inline constexpr BlockIndex kNoBlock = ~BlockIndex{0};

class BlockTable {
 public:
  struct Slot {
    std::uint64_t word = 0;
    BlockIndex block = kNoBlock;  // kNoBlock: free
    std::uint32_t more = 0;       // what the owner of the table keeps with it
  };

  explicit BlockTable(std::uint64_t seed) : seed_(seed) {}
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // The slot of a word, if `same` agrees; null: there is none.
  template <class Same>
  Slot* find(std::uint64_t word, Same same) {
    if (slots_.empty()) return nullptr;
    for (std::size_t i = home(word); slots_[i].block != kNoBlock; i = next(i))
      if (slots_[i].word == word && same(slots_[i])) return &slots_[i];
    return nullptr;
  }
  Slot* find(std::uint64_t word) {
    return find(word, [](const Slot&) { return true; });
  }
  const Slot* find(std::uint64_t word) const { return const_cast<BlockTable*>(this)->find(word); }
  void prefetch(std::uint64_t word) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[home(word)]);
  }

  // Makes room for one more, so that insert() cannot fail.
  void reserve() {
    if ((size_ + 1) * 4 > slots_.size() * 3) grow();
  }
  Slot* insert(std::uint64_t word, BlockIndex block, std::uint32_t more) noexcept {
    ++size_;
    return place({word, block, more});
  }
  void erase(Slot* slot) noexcept {
    std::size_t hole = static_cast<std::size_t>(slot - slots_.begin());
    // Move entries that were pushed past the hole back, so that no search stops early.
    for (std::size_t i = next(hole); slots_[i].block != kNoBlock; i = next(i)) {
      if (pushed(home(slots_[i].word), i) >= pushed(hole, i)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = {};
    --size_;
  }
  void clear() noexcept {
    Array<Slot> none;
    slots_.swap(none);
    size_ = 0;
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return slots_.bytes(); }
  const Array<Slot>& slots() const { return slots_; }
  // The next used slot from a place on, around the end; the table has one.
  Slot* used_from(std::size_t place) {
    assert(size_ > 0);
    std::size_t i = place % slots_.size();
    while (slots_[i].block == kNoBlock)
      i = next(i);
    return &slots_[i];
  }
  std::size_t place_of(const Slot* slot) const { return static_cast<std::size_t>(slot - slots_.begin()); }

 private:
  std::size_t home(std::uint64_t word) const {
    return static_cast<std::size_t>(fold(word ^ seed_, 0x9E3779B97F4A7C15ull)) & (slots_.size() - 1);
  }
  std::size_t next(std::size_t i) const { return (i + 1) & (slots_.size() - 1); }
  std::size_t pushed(std::size_t from, std::size_t to) const { return (to - from) & (slots_.size() - 1); }
  Slot* place(const Slot& slot) {
    std::size_t i = home(slot.word);
    while (slots_[i].block != kNoBlock)
      i = next(i);
    slots_[i] = slot;
    return &slots_[i];
  }
  void grow() {
    Array<Slot> old;
    old.resize(slots_.empty() ? 16 : slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.block != kNoBlock) place(slot);
  }

  std::uint64_t seed_;
  Array<Slot> slots_;  // a power of two
  std::size_t size_ = 0;
};

}  // namespace mainstem
