// ARC: pages seen once and pages seen again in two queues by recency, with a ghost of each; a hit in a ghost enlarges
// its queue's share. Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
#pragma once

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

class Arc final : public Remembering<InQueue> {
 public:
  using Remembering::Remembering;
  std::uint32_t queues() const override { return 2; }
  std::size_t bytes() const override { return Remembering::bytes() + once_.bytes() + again_.bytes(); }
  Place place(Index index, std::uint64_t accessed) const override { return {{number(accessed), 0}, queue(index)}; }
  bool remembers(std::uint64_t page) const override { return once_.contains(page) || again_.contains(page); }

  void came(Index index) noexcept override {
    bool known = false;
    returned_ = false;
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { known = recall(page) || known; });
    enter(index, {known});
  }
  void used(Index index) noexcept override {
    if (queue(index) == 0) move(index, 1);
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    Ghost& ghost = queue(index) ? again_ : once_;
    around_.each_page(index, pages, [&](std::uint64_t page) { ghost.add({page}, 2 * capacity()); });
  }

  std::uint32_t choose(const Queues& queues) override {
    const double once = number(without_newcomers());
    return either(queues, once > share_ || (returned_ && once == share_ && once > 0) ? 0 : 1);
  }

 private:
  bool recall(std::uint64_t page) noexcept {
    const double once = number(once_.size()), again = number(again_.size());
    if (once_.remove(page)) {
      share_ = std::min(number(capacity()), share_ + std::max(1.0, again / once));
      returned_ = false;
      return true;
    }
    if (!again_.remove(page)) return false;
    share_ = std::max(0.0, share_ - std::max(1.0, once / again));
    returned_ = true;
    return true;
  }
  // A queue and its ghost hold at most the capacity, all together twice that.
  void bound(const Queues&) noexcept override {
    const std::uint64_t all = 2 * capacity_, present = sizes_[0] + sizes_[1];
    once_.bound(capacity_ - std::min(capacity_, sizes_[0]));
    again_.bound(all - std::min(all, present + once_.size()));
    share_ = std::min(share_, number(capacity_));
  }

  Ghost once_, again_;
  double share_ = 0;       // pages for those seen once: p in the paper
  bool returned_ = false;  // the last new page was in the ghost of those seen again
};

}  // namespace mainstem
