// Tail: LRU that bounds what the loss of a session costs its first token. The last pages of every session go
// before any session loses more: to compute a few pages again delays a first token little, and the room keeps sessions
// that LRU would have lost whole. The idea is that of Tail-Optimized LRU (arXiv 2510.15152), which is told a bound;
// this one finds it.
//
//   session     |<------------------ reach, in pages ------------------>|
//               |<-- cut, the least recently used first -->|<- ending ->|      an ending has at most ending_ pages
//
// A page more for each ending frees a page for each leaf, and costs a page for each session that returns. A page more
// of room keeps what was just cut. Where the latter is worth more, endings become longer, else shorter.
#pragma once

#include <algorithm>

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

struct TailRecord : InQueue {
  std::uint32_t reach = 0;  // the length of the request that last used it
  bool here = false;
  bool offered = false;
};

class TailAware final : public Remembering<TailRecord> {
 public:
  using Remembering::Remembering;
  void reserve(std::size_t nodes) override {
    Remembering::reserve(nodes);
    endings_.reserve(nodes);
  }
  std::size_t bytes() const override { return Remembering::bytes() + endings_.bytes() + gone_.bytes(); }

  Place place(Index, std::uint64_t accessed) const override { return {{number(accessed), 0}}; }  // LRU's
  bool alike(Index upper, Index lower) const override { return records_[upper].reach <= records_[lower].reach; }
  std::uint32_t alike_pages(std::uint64_t, std::uint32_t, Bytes key) noexcept override {
    return static_cast<std::uint32_t>(key.size() / around_.page_bytes);
  }
  void split(Index upper, Index lower) noexcept override {
    records_[upper] = records_[lower];
    records_[upper].offered = false;
  }
  void joined(Index upper, Index) noexcept override { records_[upper].here = false; }
  void came(Index index) noexcept override {
    const bool offered = records_[index].offered;
    enter(index, {{}, node(index).end(), true, offered});
  }
  void used(Index index) noexcept override { records_[index].reach = asked_; }

  void asked(std::uint64_t root, Index deepest, Bytes key) noexcept override {
    asked_ = static_cast<std::uint32_t>(key.size() / around_.page_bytes);
    longest_ = std::max(longest_, asked_);
    while (deepest != kNone && !node(deepest).root() && !records_[deepest].here)
      deepest = node(deepest).parent;
    const bool found = deepest != kNone && !node(deepest).root();
    miss(found ? around_.names[deepest] : root, found && node(deepest).branches == 0,
         key.subspan(std::size_t{found ? node(deepest).end() : 0} * around_.page_bytes));
    requested_ += asked_;
    if (!full() || requested_ < next_) return;
    adapt();
    next_ = requested_ + std::max(kLeastPace, capacity() / 2);
  }

  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    const std::uint8_t ending = endings_.contains(index);
    around_.each_page(index, pages, [&](std::uint64_t page) { gone_.add({page, went_++, ending}, 2 * capacity()); });
    if (pages < node(index).pages) return;
    records_[index].here = false;
    const Index above = node(index).parent;
    if (node(index).accessed >= node(above).accessed) records_[above].reach = records_[index].reach;
  }

  void offered(Index index) noexcept override {
    leaves_ += !records_[index].offered;
    records_[index].offered = true;
    arrange(index);
  }
  void withdrawn(Index index) noexcept override {
    leaves_ -= records_[index].offered;
    records_[index].offered = false;
    if (endings_.contains(index)) endings_.remove(index);
  }
  bool offers(Index index, bool) const override { return records_[index].offered; }
  Index victim(const Queues& queues) override { return endings_.empty() ? queues.top() : endings_.top(); }
  std::uint64_t at_once(Index victim) const override {
    return endings_.contains(victim) ? ending_pages() - lost(victim) : Remembering::at_once(victim);
  }

 private:
  // kRecent: for how long a page that was cut would have been kept by a little more room, in capacities. kTail: how
  // many pages of endings a page that was cut is worth; with 1, hits would be the most. kStep: how far endings change
  // at once. kKept: the part of the counts that is kept then. docs/decisions.md has what others gave.
  static constexpr double kRecent = 0.25, kTail = 1.5, kStep = 0.3, kKept = 0.7;
  static constexpr std::uint64_t kLeastPace = 64;  // pages asked for between two changes

  std::uint32_t lost(Index index) const {
    const std::uint32_t end = node(index).end();
    return std::max(records_[index].reach, end) - end;
  }
  std::uint32_t ending_pages() const { return static_cast<std::uint32_t>(ending_); }

  void arrange(Index index) noexcept {
    if (lost(index) < ending_pages())
      endings_.put(index, {number(node(index).accessed), 0}, node(index).start);
    else if (endings_.contains(index))
      endings_.remove(index);
  }

  // Counts the pages of a request that are not there. Of a path, the end goes first: behind an unknown page are none.
  // A session of which nothing is missing would have lost a page, too, if endings were longer.
  void miss(std::uint64_t name, bool at_leaf, Bytes rest) noexcept {
    if (rest.empty()) returned_ += at_leaf;
    for (std::size_t at = 0; at < rest.size(); at += around_.page_bytes) {
      name = PageName::after(name, rest.data() + at, around_.page_bytes);
      Recall<std::uint32_t>::Entry entry;
      const bool known = gone_.remove(name, &entry);
      if (at == 0) returned_ += known ? entry.note : at_leaf;
      if (!known) return;
      cut_ += !entry.note && went_ - entry.time <= kRecent * number(capacity());
    }
  }

  void adapt() noexcept {
    const double gain = kTail * cut_ / std::max(1.0, kRecent * number(capacity()));
    const double cost = returned_ / std::max(1.0, number(leaves_));
    const double step = gain + cost > 0 ? kStep * (gain - cost) / (gain + cost) : 0;
    const std::uint32_t before = ending_pages();
    ending_ = step < 0 ? (ending_ + 1) * (1 + step) - 1 : (ending_ + 0.5) * (1 + step);
    ending_ = std::clamp(ending_, 0.0, number(longest_));
    cut_ *= kKept;
    returned_ *= kKept;
    if (ending_pages() == before) return;
    for (Index index = 1; index < records_.size(); ++index)
      if (records_[index].offered) arrange(index);
  }

  Order endings_;               // candidates that have lost less than an ending
  Recall<std::uint32_t> gone_;  // evicted pages, by how many went before; the note: as a part of an ending
  std::uint32_t went_ = 0, asked_ = 0, longest_ = 0;
  std::uint64_t requested_ = 0, next_ = 0, leaves_ = 0;
  double ending_ = 0;              // pages
  double cut_ = 0, returned_ = 0;  // pages asked for that were cut lately; requests that reached the end of a session
};

}  // namespace mainstem
