// LRU-2: evicts pages used only once first, then those whose last but one use is oldest. It remembers the times of use
// of evicted pages, four times as many as are present. O'Neil, O'Neil and Weikum, "The LRU-K page replacement
// algorithm for database disk buffering", SIGMOD 1993, without a correlated reference period.
#pragma once

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

struct Lru2Record : InQueue {
  std::uint64_t last = 0, before = 0;  // ticks; 0: never
  bool operator==(const Lru2Record&) const = default;
};

class Lru2 final : public Remembering<Lru2Record> {
 public:
  using Remembering::Remembering;
  std::size_t bytes() const override { return Remembering::bytes() + history_.bytes(); }
  Place place(Index index, std::uint64_t) const override {
    return {{number(records_[index].before), number(records_[index].last)}};
  }
  bool remembers(std::uint64_t page) const override { return history_.contains(page); }

  void came(Index index) noexcept override {
    Ghost::Entry past{};
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { history_.remove(page, &past); });
    enter(index, {{}, around_.tick, past.time});
  }
  void used(Index index) noexcept override {
    records_[index].before = std::exchange(records_[index].last, around_.tick);
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    const std::uint64_t last = records_[index].last;
    around_.each_page(index, pages, [&](std::uint64_t page) { history_.add({page, last}, kKept * capacity()); });
  }

 private:
  static constexpr std::size_t kKept = 4;

  void bound(const Queues&) noexcept override { history_.bound(kKept * capacity_); }

  Ghost history_;
};

}  // namespace mainstem
