// S3-FIFO: a small queue, a main queue and a ghost, all first in, first out. A node used twice in the small queue moves
// to the main queue, where each use buys another round. Yang et al., "FIFO queues are all you need for cache eviction",
// SOSP 2023: the small queue has 10 %, the ghost as many pages as are present.
#pragma once

#include "eviction/policies/recall.h"
#include "eviction/replacement.h"

namespace mainstem {

struct S3FifoRecord : InQueue {
  std::uint8_t uses = 0;
  std::uint64_t number = 0;  // order of joining the queue
  bool operator==(const S3FifoRecord&) const = default;
};

class S3Fifo final : public Remembering<S3FifoRecord> {
 public:
  using Remembering::Remembering;
  std::uint32_t queues() const override { return 2; }
  std::size_t bytes() const override { return Remembering::bytes() + ghost_.bytes(); }
  Place place(Index index, std::uint64_t) const override { return {{number(records_[index].number), 0}, queue(index)}; }
  bool remembers(std::uint64_t page) const override { return ghost_.contains(page); }

  void came(Index index) noexcept override {
    bool known = false;
    around_.each_page(index, node(index).pages, [&](std::uint64_t page) { known = ghost_.remove(page) || known; });
    enter(index, {{known}, 0, ++joined_});
  }
  void used(Index index) noexcept override {
    if (records_[index].uses < kMaxUses) ++records_[index].uses;
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    if (queue(index)) return;
    around_.each_page(index, pages, [&](std::uint64_t page) { ghost_.add({page}, capacity()); });
  }

  std::uint32_t choose(const Queues& queues) override {
    return either(queues, 10 * without_newcomers() >= capacity() ? 0 : 1);
  }
  bool spares(Index index) override {
    S3FifoRecord& record = records_[index];
    if (record.queue == 0 && record.uses > 1) {
      move(index, 1);
      record.uses = 0;
    } else if (record.queue == 1 && record.uses > 0) {
      --record.uses;
    } else {
      return false;
    }
    record.number = ++joined_;
    return true;
  }

 private:
  static constexpr std::uint8_t kMaxUses = 3;

  void bound(const Queues&) noexcept override { ghost_.bound(capacity_); }

  Ghost ghost_;
  std::uint64_t joined_ = 0;
};

}  // namespace mainstem
