// W-TinyLFU: new pages enter a small window; a page that leaves it enters the main part if it was requested more often
// than the page that it would displace. A sketch counts the requests of all pages, and halves its counts from time to
// time. Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM ToS 2017: the window
// has 1 %, and of the rest four fifths are protected.
#pragma once

#include "eviction/policies/sketch.h"
#include "eviction/replacement.h"

namespace mainstem {

// Numbered when a node joins its queue, or is used in it.
class WTinyLfu final : public Remembering<Numbered> {
 public:
  using Remembering::Remembering;
  std::uint32_t queues() const override { return 3; }
  std::size_t bytes() const override { return Remembering::bytes() + sketch_.bytes(); }
  Place place(Index index, std::uint64_t) const override { return {{number(records_[index].number), 0}, queue(index)}; }

  void came(Index index) noexcept override {
    enter(index, {{kWindow}, ++turns_});
    count(index);
  }
  void used(Index index) noexcept override {
    if (queue(index) == kProbation) move(index, kProtected);
    records_[index].number = ++turns_;
    count(index);
  }

  std::uint32_t choose(const Queues& queues) override {
    const std::uint64_t window = std::max<std::uint64_t>(1, capacity() / 100);
    const std::uint64_t main = capacity() - std::min(capacity(), window);
    moves_ = true;
    if (sizes_[kProtected] > main * 4 / 5 && !queues.empty(kProtected)) return kProtected;
    const std::uint32_t loser = queues.empty(kProbation) ? kProtected : kProbation;
    if (sizes_[kWindow] > window && !queues.empty(kWindow)) {
      moves_ = sizes_[kProbation] + sizes_[kProtected] < main ||
               (!queues.empty(loser) && asked(queues.top(kWindow)) > asked(queues.top(loser)));
      return kWindow;
    }
    moves_ = false;
    return queues.empty(loser) ? kWindow : loser;
  }
  bool spares(Index index) override {
    if (!moves_) return false;
    move(index, kProbation);
    records_[index].number = ++turns_;
    return true;
  }

 private:
  static constexpr std::uint8_t kWindow = 0, kProbation = 1, kProtected = 2;

  std::uint32_t asked(Index index) const { return sketch_.count(around_.names[index]); }  // of its last page
  void count(Index index) noexcept {
    sketch_.widen(sizes_[kWindow] + sizes_[kProbation] + sizes_[kProtected]);
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { sketch_.add(page); });
  }

  Sketch sketch_;
  std::uint64_t turns_ = 0;
  bool moves_ = false;  // the chosen victim goes to probation instead
};

}  // namespace mainstem
