// GDSF: uses times the cost of computing a page again, plus the worth of the last evicted node, so that unused nodes
// age. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP
// Labs 1998; pages are of one size.
#pragma once

#include "eviction/policies/cost.h"

namespace mainstem {

struct GdsfRecord : InQueue {
  std::uint32_t uses = 0;
  double worth = 0;
  bool operator==(const GdsfRecord&) const = default;
};

class Gdsf final : public Remembering<GdsfRecord> {
 public:
  using Remembering::Remembering;
  Place place(Index index, std::uint64_t accessed) const override {
    return {{records_[index].worth, number(accessed)}};
  }

  void came(Index index) noexcept override {
    enter(index, {});
    used(index);
  }
  void used(Index index) noexcept override {
    GdsfRecord& record = records_[index];
    record.worth = inflation_ + ++record.uses * page_cost(node(index), around_);
  }
  Index victim(const Queues& queues) override {
    lowest_ = records_[queues.top()].worth;
    return queues.top();
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    inflation_ = std::max(inflation_, std::min(lowest_, records_[index].worth));  // others may have chosen it
  }

 private:
  double inflation_ = 0, lowest_ = 0;
};

}  // namespace mainstem
