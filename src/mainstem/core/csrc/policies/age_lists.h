// Age lists: the candidates of each kind and age bucket, least recently used first, and the list with the lowest index.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "../node.h"
#include "reuse_index.h"

namespace mainstem {

// The record of a node in a list.
struct Aged {
  static constexpr std::uint16_t kNoList = std::numeric_limits<std::uint16_t>::max();
  std::uint16_t list = kNoList;
  std::uint32_t last = 0;  // its last use; modulo 2**32
  Index older = kNone, newer = kNone;
};

// Record derives from Aged; `records` are by node.
template <class Record>
class AgeLists {
 public:
  explicit AgeLists(Array<Record>* records) : records_(*records) { order_.reserve(kLists); }

  std::size_t bytes() const { return order_.capacity() * sizeof(order_[0]); }

  void put(Index node, int kind, std::uint32_t now, const ReuseIndex& index) noexcept {
    Record& record = records_[node];
    const int list = kind * ages::kBuckets + ages::bucket(now - record.last);
    record.list = static_cast<std::uint16_t>(list);
    List& to = lists_[static_cast<std::size_t>(list)];
    if (to.oldest == kNone) {
      to.oldest = to.newest = node;
      record.older = record.newer = kNone;
      filled_[bucket(list)] |= bit(list);
      if (!to.ordered) order(list, index);
      return;
    }
    insert(&to, node, now);
  }
  void remove(Index node) noexcept {
    Record& record = records_[node];
    if (record.list == Aged::kNoList) return;
    List& from = lists_[record.list];
    (record.older == kNone ? from.oldest : records_[record.older].newer) = record.newer;
    (record.newer == kNone ? from.newest : records_[record.newer].older) = record.older;
    if (from.oldest == kNone) filled_[bucket(record.list)] &= ~bit(record.list);
    record.list = Aged::kNoList;
  }

  // Moves nodes that have become too old for a list to the next one. Checks each bucket a few times in its width.
  void age(std::uint32_t now, const ReuseIndex& index) noexcept {
    if (static_cast<std::int32_t>(now - next_due_) < 0) return;
    next_due_ = now + (1u << 30);
    for (std::size_t b = 0; b + 1 < ages::kBuckets; ++b) {
      if (static_cast<std::int32_t>(now - due_[b]) >= 0) {
        due_[b] = now + std::max(kOften, static_cast<std::uint32_t>(ages::width(static_cast<int>(b))) / 4);
        for (std::uint64_t kinds = filled_[b]; kinds; kinds &= kinds - 1)
          move_on(std::countr_zero(kinds), static_cast<int>(b), now, index);
      }
      if (static_cast<std::int32_t>(due_[b] - next_due_) < 0) next_due_ = due_[b];
    }
  }

  // Returns the node to evict first; there is one.
  Index lowest() noexcept {
    for (;;) {
      List& least = lists_[order_.front() & 0xffff];
      if (least.oldest != kNone) return least.oldest;
      std::pop_heap(order_.begin(), order_.end(), std::greater<>());
      order_.pop_back();
      least.ordered = false;
    }
  }
  // Reorders the lists after a lesson.
  void reorder(const ReuseIndex& index) noexcept {
    order_.clear();
    for (std::size_t list = 0; list < kLists; ++list) {
      lists_[list].ordered = lists_[list].oldest != kNone;
      if (lists_[list].ordered) note_order(static_cast<int>(list), index);
    }
    std::make_heap(order_.begin(), order_.end(), std::greater<>());
  }

 private:
  static constexpr std::size_t kLists = std::size_t{ReuseIndex::kKinds} * ages::kBuckets;
  static_assert(ReuseIndex::kKinds <= 64 && kLists < Aged::kNoList);
  static constexpr std::uint32_t kOften = 64;  // the fewest accesses between two checks of a bucket
  static constexpr int kSteps = 8;             // how far a list is searched for a node's place, from both ends
  struct List {
    Index oldest = kNone, newest = kNone;
    bool ordered = false;  // is in order_
  };

  static std::size_t bucket(int list) { return static_cast<std::size_t>(list % ages::kBuckets); }
  static std::uint64_t bit(int list) { return std::uint64_t{1} << (list / ages::kBuckets); }

  void note_order(int list, const ReuseIndex& index) noexcept {
    const float rank = index.at(list / ages::kBuckets, list % ages::kBuckets);
    order_.push_back(std::uint64_t{std::bit_cast<std::uint32_t>(rank)} << 16 | static_cast<std::uint64_t>(list));
  }
  void order(int list, const ReuseIndex& index) noexcept {
    lists_[static_cast<std::size_t>(list)].ordered = true;
    note_order(list, index);
    std::push_heap(order_.begin(), order_.end(), std::greater<>());
  }
  void insert(List* to, Index node, std::uint32_t now) noexcept {
    const auto age = [&](Index at) { return now - records_[at].last; };
    Index old = to->oldest, young = to->newest;
    for (int step = 0;; ++step) {
      if (age(young) >= age(node)) return link(to, young, records_[young].newer, node);
      if (age(old) <= age(node) || step == kSteps) return link(to, records_[old].older, old, node);
      old = records_[old].newer;
      young = records_[young].older;
    }
  }
  void link(List* to, Index older, Index newer, Index node) noexcept {
    records_[node].older = older;
    records_[node].newer = newer;
    (older == kNone ? to->oldest : records_[older].newer) = node;
    (newer == kNone ? to->newest : records_[newer].older) = node;
  }
  void move_on(int kind, int bucket, std::uint32_t now, const ReuseIndex& index) noexcept {
    const List& list = lists_[static_cast<std::size_t>(kind * ages::kBuckets + bucket)];
    while (list.oldest != kNone && ages::bucket(now - records_[list.oldest].last) > bucket) {
      const Index node = list.oldest;
      remove(node);
      put(node, kind, now, index);
    }
  }

  Array<Record>& records_;
  std::array<List, kLists> lists_{};
  std::array<std::uint64_t, ages::kBuckets> filled_{};  // by bucket: a bit for each kind
  std::array<std::uint32_t, ages::kBuckets> due_{};
  std::uint32_t next_due_ = 0;
  // A heap of list numbers, with the list's index in the upper bits (non-negative floats are ordered like their bits).
  // An emptied list stays until it reaches the top.
  std::vector<std::uint64_t> order_;
};

}  // namespace mainstem
