// Replacement: a policy that remembers more about a node than the node stores: queues, second chances, evicted pages.
//
// One object serves one component on one tier. It is notified of what happens to the nodes that are present there, and
// assigns each a place: a queue and a rank. Events arrive before the tree asks for the new place. A node's pages share
// one record; a split copies it. Nothing here can fail once reserve() has returned: a policy forgets what it has no
// memory for. Policies do not see locks and children: the tree puts only candidates into the order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "eviction/order.h"
#include "eviction/page_name.h"
#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

using Bytes = std::span<const std::uint8_t>;

// What a policy may read.
struct Surroundings {
  const Array<Node>& nodes;
  const Array<std::uint64_t>& names;  // by node: the name of its last page
  const std::uint64_t& tick;
  std::size_t page_bytes;
  double page_tokens;
  bool has_states;  // the model is a hybrid

  // Calls `each` with the names of the last `pages` pages of a node, the last one first.
  template <class Each>
  void each_page(Index node, std::uint32_t pages, Each each) const {
    std::uint64_t name = names[node];
    const std::uint8_t* end = nodes[node].key.data() + nodes[node].key.size();
    for (; pages > 0; --pages) {
      each(name);
      end -= page_bytes;
      name = PageName::before(name, end, page_bytes);
    }
  }
};

class Replacement {
 public:
  virtual ~Replacement() = default;
  virtual std::uint32_t queues() const { return 1; }
  virtual void reserve(std::size_t nodes) = 0;
  virtual std::size_t bytes() const = 0;

  virtual Place place(Index node, std::uint64_t accessed) const = 0;  // of a node last used at `accessed`
  virtual std::uint32_t queue(Index node) const = 0;
  virtual bool alike(Index upper, Index lower) const = 0;  // whether one record fits both
  // How many of the first pages of `key`, after the page named `before` at `depth`, have the same history.
  virtual std::uint32_t alike_pages(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept = 0;

  // A request looked up these pages from a root of that name, and found the path to this node, on some tier.
  virtual void asked(std::uint64_t, Index, Bytes) noexcept {}
  virtual void used(Index) noexcept {}                              // a match went through it
  virtual void came(Index node) noexcept = 0;                       // all its pages are present now
  virtual void gone(Index node, std::uint32_t pages) noexcept = 0;  // its last `pages` pages are being evicted
  virtual void split(Index upper, Index lower) noexcept = 0;        // the upper is new
  virtual void joined(Index, Index) noexcept {}                     // the upper becomes a part of the lower
  virtual void offered(Index) noexcept {}  // it is a candidate, has changed, and is in its place
  virtual void withdrawn(Index) noexcept {}

  // The next victim; there is a candidate. Called again after each one that was spared.
  virtual Index victim(const Queues& queues) { return queues.top(choose(queues)); }
  // Whether the victim gets a second chance; if so, it has a new place.
  virtual bool spares(Index) { return false; }
  // How many pages of a victim are evicted before the next victim is chosen.
  virtual std::uint64_t at_once(Index) const { return ~std::uint64_t{0}; }
  virtual bool offers(Index, bool candidate) const { return candidate; }  // for check()

  // `present` pages remain after an eviction: as many as there is room for.
  void learn_capacity(std::uint64_t present, const Queues& queues) noexcept {
    capacity_ = present;
    bound(queues);
  }
  std::uint64_t size(std::uint32_t queue) const { return sizes_[queue]; }

 protected:
  virtual std::uint32_t choose(const Queues&) { return 0; }  // the queue to take the victim from; it is not empty
  virtual void bound(const Queues&) noexcept {}              // forgets what exceeds its bounds

  bool full() const { return capacity_ != 0; }  // there was an eviction
  // Before the first eviction: one page less than is present.
  std::uint64_t capacity() const {
    const std::uint64_t present = sizes_[0] + sizes_[1] + sizes_[2];
    return capacity_ ? capacity_ : present - std::min<std::uint64_t>(present, 1);
  }

  std::array<std::uint64_t, kQueues> sizes_{};  // pages by queue
  std::uint64_t capacity_ = 0;
};

// The records of a policy by node. A record has at least a queue.
struct InQueue {
  std::uint8_t queue = 0;
  bool operator==(const InQueue&) const = default;
};

struct Numbered : InQueue {
  std::uint64_t number = 0;  // of a policy's events, in order
  bool operator==(const Numbered&) const = default;
};

template <class Record>
class Remembering : public Replacement {
 public:
  explicit Remembering(const Surroundings& around) : around_(around) {}

  void reserve(std::size_t nodes) override { records_.resize(nodes); }
  std::size_t bytes() const override { return records_.bytes(); }
  std::uint32_t queue(Index node) const override { return records_[node].queue; }
  bool alike(Index upper, Index lower) const override { return records_[upper] == records_[lower]; }
  std::uint32_t alike_pages(std::uint64_t before, std::uint32_t, Bytes key) noexcept override {
    const std::uint8_t* at = key.data();
    const auto next_is_known = [&] {
      before = PageName::after(before, std::exchange(at, at + around_.page_bytes), around_.page_bytes);
      return remembers(before);
    };
    const bool known = next_is_known();
    std::uint32_t alike = 1;
    while (at != key.data() + key.size() && next_is_known() == known)
      ++alike;
    return alike;
  }
  void split(Index upper, Index lower) noexcept override { records_[upper] = records_[lower]; }
  void gone(Index node, std::uint32_t pages) noexcept override { sizes_[records_[node].queue] -= pages; }

 protected:
  virtual bool remembers(std::uint64_t) const { return false; }  // an evicted page
  const Node& node(Index index) const { return around_.nodes[index]; }

  void enter(Index index, Record record) noexcept {
    records_[index] = record;
    sizes_[record.queue] += node(index).pages;
    if (newest_ != around_.tick) newcomers_ = 0;
    newest_ = around_.tick;
    if (record.queue == 0) newcomers_ += node(index).pages;
  }
  void move(Index index, std::uint8_t queue) noexcept {
    sizes_[records_[index].queue] -= node(index).pages;
    sizes_[queue] += node(index).pages;
    records_[index].queue = queue;
  }
  // Pages in the first queue except newcomers of this tick: papers choose the victim before they insert those.
  std::uint64_t without_newcomers() const {
    return sizes_[0] - (newest_ == around_.tick ? std::min(newcomers_, sizes_[0]) : 0);
  }
  static std::uint32_t either(const Queues& queues, std::uint32_t queue) {
    return queues.empty(queue) ? 1 - queue : queue;
  }

  Surroundings around_;
  Array<Record> records_;

 private:
  std::uint64_t newest_ = 0, newcomers_ = 0;
};

}  // namespace mainstem
