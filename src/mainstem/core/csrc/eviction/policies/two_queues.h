// 2Q: new pages enter a queue of their own, first in, first out; only pages that return after leaving that queue join
// those kept by recency. Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement
// algorithm", VLDB 1994, the full version with Kin = 25 % and Kout = 50 %.
#pragma once

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

// Numbered by arrival.
class TwoQueues final : public Remembering<Numbered> {
 public:
  using Remembering::Remembering;
  std::uint32_t queues() const override { return 2; }
  std::size_t bytes() const override { return Remembering::bytes() + out_.bytes(); }
  Place place(Index index, std::uint64_t accessed) const override {
    const Numbered& record = records_[index];
    return {{number(record.queue ? accessed : record.number), 0}, record.queue};
  }
  bool remembers(std::uint64_t page) const override { return out_.contains(page); }

  void came(Index index) noexcept override {
    bool known = false;
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { known = out_.remove(page) || known; });
    enter(index, {{known}, ++arrivals_});
  }
  void used(Index) noexcept override {}
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    if (queue(index)) return;
    around_.each_page(index, pages, [&](std::uint64_t page) { out_.add({page}, capacity() / 2); });
  }

  std::uint32_t choose(const Queues& queues) override {
    return either(queues, without_newcomers() > capacity() / 4 ? 0 : 1);
  }

 private:
  void bound(const Queues&) noexcept override { out_.bound(capacity_ / 2); }

  Ghost out_;
  std::uint64_t arrivals_ = 0;
};

}  // namespace mainstem
