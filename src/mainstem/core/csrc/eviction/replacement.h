// Replacement: a policy that remembers more about a node than the node stores: queues, its history, evicted pages.
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

#include "eviction/order.h"
#include "eviction/page_name.h"
#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

using Bytes = std::span<const std::uint8_t>;

// The state that a policy may read.
struct Surroundings {
  const Array<Node>& nodes;
  const Array<std::uint64_t>& names;  // by node: the name of its last page
  const std::uint64_t& tick;
  std::size_t page_bytes;

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

  virtual Index victim(const Queues& queues) = 0;  // the next one; there is a candidate
  // How many pages of a victim are evicted before the next victim is chosen.
  virtual std::uint64_t at_once(Index) const { return ~std::uint64_t{0}; }
  virtual bool offers(Index, bool candidate) const { return candidate; }  // for check()

  // `present` pages remain after an eviction: as many as there is room for.
  void learn_capacity(std::uint64_t present) noexcept {
    capacity_ = present;
    bound();
  }
  std::uint64_t size(std::uint32_t queue) const { return sizes_[queue]; }

 protected:
  virtual void bound() noexcept {}  // forgets what exceeds its bounds

  bool full() const { return capacity_ != 0; }  // there was an eviction
  // Before the first eviction: one page less than is present.
  std::uint64_t capacity() const {
    const std::uint64_t present = sizes_[0] + sizes_[1];
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

template <class Record>
class Remembering : public Replacement {
 public:
  explicit Remembering(const Surroundings& around) : around_(around) {}

  void reserve(std::size_t nodes) override { records_.resize(nodes); }
  std::size_t bytes() const override { return records_.bytes(); }
  std::uint32_t queue(Index node) const override { return records_[node].queue; }
  bool alike(Index upper, Index lower) const override { return records_[upper] == records_[lower]; }
  void split(Index upper, Index lower) noexcept override { records_[upper] = records_[lower]; }
  void gone(Index node, std::uint32_t pages) noexcept override { sizes_[records_[node].queue] -= pages; }

 protected:
  const Node& node(Index index) const { return around_.nodes[index]; }

  void enter(Index index, Record record) noexcept {
    records_[index] = record;
    sizes_[record.queue] += node(index).pages;
  }

  Surroundings around_;
  Array<Record> records_;
};

}  // namespace mainstem
