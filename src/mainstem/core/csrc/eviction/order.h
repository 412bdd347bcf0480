// Eviction order: the candidates of one component on one tier, in indexed heaps by rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

// The candidate with the lowest rank is evicted first.
struct Rank {
  double major = 0;
  double minor = 0;
  auto operator<=>(const Rank&) const = default;
};

// The place of a candidate: its rank in one of the queues of its order.
struct Place {
  Rank rank;
  std::uint32_t queue = 0;
  bool operator==(const Place&) const = default;
};

inline constexpr std::uint32_t kQueues = 2;                                    // at most
inline constexpr double kUnranked = -std::numeric_limits<double>::infinity();  // waits for an external rank

inline double number(std::uint64_t n) {
  return static_cast<double>(n);
}

// A 4-ary min-heap that tracks where each node is. Of equal ranks the lower depth comes first, then the lower index, so
// that the same calls give the same evictions everywhere.
class Order {
 public:
  bool contains(Index node) const { return node < place_.size() && place_[node] != kNowhere; }
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  Index top() const { return heap_.front().node; }

  // Makes room for nodes [0, nodes), so that put() cannot fail for them.
  void reserve(std::size_t nodes) {
    heap_.reserve(nodes);
    place_.resize(nodes, kNowhere);
  }

  void put(Index node, Rank rank, std::uint32_t depth) noexcept {
    const Entry entry{rank, depth, node};
    if (place_[node] == kNowhere) {
      heap_.push_back(entry);
      rise(heap_.size() - 1, entry);
      return;
    }
    const std::size_t at = place_[node];
    if (entry < heap_[at])
      rise(at, entry);
    else
      sink(at, entry);
  }

  void remove(Index node) {
    const std::size_t at = place_[node];
    place_[node] = kNowhere;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (at == heap_.size()) return;
    if (at > 0 && last < heap_[(at - 1) / kArity])
      rise(at, last);
    else
      sink(at, last);
  }

  // For check(): whether the heap and the places are consistent; whether `node` has this rank and depth.
  bool sound() const {
    for (std::size_t i = 0; i < heap_.size(); ++i) {
      if (place_[heap_[i].node] != i) return false;
      if (i > 0 && heap_[i] < heap_[(i - 1) / kArity]) return false;
    }
    return true;
  }
  bool holds(Index node, Rank rank, std::uint32_t depth) const {
    const Entry& entry = heap_[place_[node]];
    return entry.rank == rank && entry.depth == depth;
  }
  Rank rank(Index node) const { return heap_[place_[node]].rank; }
  std::size_t bytes() const { return heap_.bytes() + place_.bytes(); }

 private:
  struct Entry {
    Rank rank;
    std::uint32_t depth;
    Index node;
    bool operator<(const Entry& other) const {
      if (rank != other.rank) return rank < other.rank;
      if (depth != other.depth) return depth < other.depth;
      return node < other.node;
    }
  };
  static constexpr std::size_t kArity = 4;
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};

  void set(std::size_t at, const Entry& entry) {
    heap_[at] = entry;
    place_[entry.node] = static_cast<std::uint32_t>(at);
  }
  void rise(std::size_t at, const Entry& entry) {
    while (at > 0) {
      const std::size_t up = (at - 1) / kArity;
      if (!(entry < heap_[up])) break;
      set(at, heap_[up]);
      at = up;
    }
    set(at, entry);
  }
  void sink(std::size_t at, const Entry& entry) {
    for (;;) {
      const std::size_t first = at * kArity + 1;
      if (first >= heap_.size()) break;
      std::size_t least = first;
      const std::size_t last = std::min(first + kArity, heap_.size());
      for (std::size_t i = first + 1; i < last; ++i)
        if (heap_[i] < heap_[least]) least = i;
      if (!(heap_[least] < entry)) break;
      set(at, heap_[least]);
      at = least;
    }
    set(at, entry);
  }

  Array<Entry> heap_;
  Array<std::uint32_t> place_;  // by node
};

// A view of the orders of one component on one tier, one for each queue, `stride` apart.
class Queues {
 public:
  Queues(const Order* first, std::size_t stride, std::uint32_t count) : first_(first), stride_(stride), count_(count) {}

  const Order& at(std::uint32_t queue) const { return first_[queue * stride_]; }
  bool empty(std::uint32_t queue) const { return at(queue).empty(); }
  Index top(std::uint32_t queue = 0) const { return at(queue).top(); }
  bool empty() const { return size() == 0; }
  std::size_t size() const {
    std::size_t total = 0;
    for (std::uint32_t queue = 0; queue < count_; ++queue)
      total += at(queue).size();
    return total;
  }
  bool contains(Index node) const { return queue(node) < count_; }
  std::uint32_t queue(Index node) const {  // the number of queues if it is in none
    std::uint32_t queue = 0;
    while (queue < count_ && !at(queue).contains(node))
      ++queue;
    return queue;
  }
  Rank rank(Index node) const { return at(queue(node)).rank(node); }
  bool holds(Index node, Place place, std::uint32_t depth) const {
    return queue(node) == place.queue && at(place.queue).holds(node, place.rank, depth);
  }
  bool sound() const {
    bool all = true;
    for (std::uint32_t queue = 0; queue < count_; ++queue)
      all = all && at(queue).sound();
    return all;
  }

 private:
  const Order* first_;
  std::size_t stride_;
  std::uint32_t count_;
};

}  // namespace mainstem
