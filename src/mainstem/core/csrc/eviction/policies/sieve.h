// SIEVE: a hand moves from the oldest page to the newest, and then starts again; it skips, once, what was used since
// its last visit, and evicts the first page that was not. Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
#pragma once

#include "eviction/replacement.h"

namespace mainstem {

struct SieveRecord : InQueue {
  bool visited = false;
  std::uint64_t number = 0;  // order of arrival
  bool operator==(const SieveRecord&) const = default;
};

class Sieve final : public Remembering<SieveRecord> {
 public:
  using Remembering::Remembering;

  // By the lap in which the hand reaches it, then by arrival.
  Place place(Index index, std::uint64_t) const override {
    const Position at = position(index);
    return {{number(lap_ + (at < hand_)), number(at.first)}};
  }
  void came(Index index) noexcept override { enter(index, {{}, false, ++arrivals_}); }
  void used(Index index) noexcept override { records_[index].visited = true; }

  std::uint32_t choose(const Queues& queues) override {
    turn(queues);
    return 0;
  }
  std::uint64_t at_once(Index) const override { return 1; }  // the hand moves on, not to the page before
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    if (position(index) == hand_) ++hand_.second;
  }
  bool spares(Index index) override {
    hand_ = position(index);
    hand_.second += records_[index].visited;
    return std::exchange(records_[index].visited, false);
  }

 private:
  using Position = std::pair<std::uint64_t, std::uint32_t>;  // arrival; within one arrival, from the root
  // If nothing is left ahead of the hand, it starts again, before new pages arrive.
  void turn(const Queues& queues) noexcept {
    if (queues.empty() || queues.at(0).rank(queues.top()).major <= number(lap_)) return;
    ++lap_;
    hand_ = {};
  }
  void bound(const Queues& queues) noexcept override { turn(queues); }
  Position position(Index index) const { return {records_[index].number, node(index).start}; }

  std::uint64_t arrivals_ = 0, lap_ = 0;
  Position hand_;
};

}  // namespace mainstem
