// ARC: pages seen once and pages seen again in two queues by recency, with a ghost of each; a hit in a ghost enlarges
// its queue's share. Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
#pragma once

#include <utility>

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

class Arc final : public Remembering<InQueue> {
 public:
  using Remembering::Remembering;
  std::uint32_t queues() const override { return 2; }
  std::size_t bytes() const override { return Remembering::bytes() + once_.bytes() + again_.bytes(); }
  Place place(Index index, std::uint64_t accessed) const override { return {{number(accessed), 0}, queue(index)}; }

  // New pages that were evicted, and those that were not, are apart.
  std::uint32_t alike_pages(std::uint64_t before, std::uint32_t, Bytes key) noexcept override {
    const std::uint8_t* at = key.data();
    const auto next_is_known = [&] {
      before = PageName::after(before, std::exchange(at, at + around_.page_bytes), around_.page_bytes);
      return once_.contains(before) || again_.contains(before);
    };
    const bool known = next_is_known();
    std::uint32_t alike = 1;
    while (at != key.data() + key.size() && next_is_known() == known)
      ++alike;
    return alike;
  }
  void came(Index index) noexcept override {
    bool known = false;
    returned_ = false;
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { known = recall(page) || known; });
    enter(index, {known});
    if (newest_ != around_.tick) newcomers_ = 0;
    newest_ = around_.tick;
    if (!known) newcomers_ += node(index).pages;
  }
  void used(Index index) noexcept override {
    if (queue(index) != 0) return;
    sizes_[0] -= node(index).pages;
    sizes_[1] += node(index).pages;
    records_[index].queue = 1;
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    Ghost& ghost = queue(index) ? again_ : once_;
    around_.each_page(index, pages, [&](std::uint64_t page) { ghost.add({page}, 2 * capacity()); });
  }

  // Newcomers of this tick do not count: the paper chooses the victim before it inserts them.
  Index victim(const Queues& queues) override {
    const double once = number(sizes_[0] - (newest_ == around_.tick ? std::min(newcomers_, sizes_[0]) : 0));
    const std::uint32_t queue = once > share_ || (returned_ && once == share_ && once > 0) ? 0 : 1;
    return queues.top(queues.empty(queue) ? 1 - queue : queue);
  }

 private:
  using Ghost = Recall<std::uint32_t>;  // without times

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
  void bound() noexcept override {
    const std::uint64_t all = 2 * capacity_, present = sizes_[0] + sizes_[1];
    once_.bound(capacity_ - std::min(capacity_, sizes_[0]));
    again_.bound(all - std::min(all, present + once_.size()));
    share_ = std::min(share_, number(capacity_));
  }

  Ghost once_, again_;
  std::uint64_t newest_ = 0, newcomers_ = 0;  // pages that came at that tick, and were not known
  double share_ = 0;                          // pages for those seen once: p in the paper
  bool returned_ = false;                     // the last new page was in the ghost of those seen again
};

}  // namespace mainstem
