// ShareOrders: where owners have shares, which of them gives way next, and with which node. A ShareOrder has the
// candidates of one column by owner. Each owner has a heap of its own; the owners whose first candidate
// may go are in two orders by the rank of that candidate: those beyond their guarantees, and those beyond their maxima.
//
// The heaps are pairing heaps (Fredman, Sedgewick, Sleator and Tarjan 1986): all their memory is by node, so that
// nothing fails where an owner's candidates become more.
#pragma once

#include <utility>
#include <vector>

#include "eviction/order.h"
#include "residency/residency.h"

namespace mainstem {

class ShareOrder {
 public:
  void reserve(std::size_t nodes) { links_.resize(nodes); }
  void reserve_owners(std::size_t owners) {
    if (tops_.size() < owners) tops_.resize(owners, kNone);
    spare_.reserve(owners);
    over_.reserve(owners);
  }
  std::size_t bytes() const {
    return links_.bytes() + tops_.capacity() * sizeof(Index) + spare_.bytes() + over_.bytes();
  }

  void put(Index node, OwnerId owner, Rank rank, std::uint32_t depth) noexcept {
    remove(node, owner);
    links_[node] = {rank, depth};
    tops_[owner] = merge(tops_[owner], node);
  }
  void remove(Index node, OwnerId owner) noexcept {
    Link& at = links_[node];
    if (tops_[owner] == node) {
      tops_[owner] = merge_siblings(at.child);
    } else if (at.previous != kNone) {
      Link& before = links_[at.previous];
      (before.child == node ? before.child : before.next) = at.next;
      if (at.next != kNone) links_[at.next].previous = at.previous;
      tops_[owner] = merge(tops_[owner], merge_siblings(at.child));
    }
    at = {};
  }
  // The owner has another first candidate, or more or less than before.
  void settle(OwnerId owner, const Owners& owners, std::size_t column) noexcept {
    settle(owner, owners.beyond_guarantee(owner, column) > 0, &spare_);
    settle(owner, owners.beyond_maximum(owner, column) > 0, &over_);
  }

  bool contains(Index node, OwnerId owner) const { return tops_[owner] == node || links_[node].previous != kNone; }
  bool holds(Index node, Rank rank, std::uint32_t depth) const {
    return links_[node].rank == rank && links_[node].depth == depth;
  }
  Index top(OwnerId owner) const { return tops_[owner]; }
  const Order& spare() const { return spare_; }  // owners with candidates beyond their guarantees
  const Order& over() const { return over_; }    // and beyond their maxima

 private:
  struct Link {
    Rank rank;
    std::uint32_t depth = 0;
    Index child = kNone, next = kNone;
    Index previous = kNone;  // the sibling before, or the parent of the first; none: the top, or in no heap
  };

  void settle(OwnerId owner, bool in, Order* order) noexcept {
    const Index top = tops_[owner];
    if (in && top != kNone)
      order->put(owner, links_[top].rank, links_[top].depth);
    else if (order->contains(owner))
      order->remove(owner);
  }
  bool before(Index a, Index b) const {  // as in Order
    const Link &x = links_[a], &y = links_[b];
    if (x.rank != y.rank) return x.rank < y.rank;
    return x.depth != y.depth ? x.depth < y.depth : a < b;
  }
  Index merge(Index a, Index b) noexcept {
    if (a == kNone || b == kNone) return a == kNone ? b : a;
    if (before(b, a)) std::swap(a, b);
    Link& top = links_[a];
    links_[b].next = top.child;
    links_[b].previous = a;
    if (top.child != kNone) links_[top.child].previous = b;
    top.child = b;
    top.next = top.previous = kNone;
    return a;
  }
  // In pairs from the left, then all of them from the right.
  Index merge_siblings(Index first) noexcept {
    Index pairs = kNone;  // linked by `next`, the last one first
    while (first != kNone) {
      const Index second = links_[first].next;
      const Index rest = second == kNone ? kNone : links_[second].next;
      for (const Index one : {first, second})
        if (one != kNone) links_[one].next = links_[one].previous = kNone;
      const Index pair = merge(first, second);
      links_[pair].next = pairs;
      pairs = pair;
      first = rest;
    }
    Index all = kNone;
    while (pairs != kNone) {
      const Index rest = std::exchange(links_[pairs].next, kNone);
      all = merge(all, pairs);
      pairs = rest;
    }
    return all;
  }

  Array<Link> links_;        // by node
  std::vector<Index> tops_;  // by owner
  Order spare_, over_;       // of owners
};

// Of all columns.
class ShareOrders {
 public:
  explicit ShareOrders(const Residency& cells) : cells_(cells), orders_(cells.columns) { reserve_owners(); }

  void reserve(std::size_t nodes) {
    for (ShareOrder& order : orders_)
      order.reserve(nodes);
  }
  void reserve_owners(std::size_t more = 0) {
    for (ShareOrder& order : orders_)
      order.reserve_owners(owners().size() + more);
  }
  std::size_t bytes() const {
    std::size_t total = 0;
    for (const ShareOrder& order : orders_)
      total += order.bytes();
    return total;
  }

  void put(Index node, std::size_t column, Rank rank, std::uint32_t depth) noexcept {
    orders_[column].put(node, owners().of(node), rank, depth);
    settle(owners().of(node), column);
  }
  void remove(Index node, std::size_t column) noexcept {
    orders_[column].remove(node, owners().of(node));
    settle(owners().of(node), column);
  }
  // The node is about to have another owner: it is to be put again then.
  void leave(Index node) noexcept {
    for (ShareOrder& order : orders_)
      order.remove(node, owners().of(node));
  }
  void settle(OwnerId owner) noexcept {  // what it has was counted again
    for (std::size_t column = 0; column < orders_.size(); ++column)
      settle(owner, column);
  }

  // The next victim for an owner that asks for `want` ids; `by_policy` returns that of the policy among all candidates.
  // If that one may not go, the rank decides among the others: for policies that remember, recency.
  template <class ByPolicy>
  Index victim(std::size_t column, OwnerId asker, std::uint64_t want, ByPolicy by_policy) const {
    const ShareOrder& order = orders_[column];
    if (asker == kEverybody) return by_policy();
    if (!order.over().empty()) return order.top(order.over().top());
    const Index own = order.top(asker);
    if (order.spare().empty() || (own != kNone && owners().beyond_maximum(asker, column, want))) return own;
    const Index first = by_policy();
    return first != kNone && order.spare().contains(owners().of(first)) ? first : order.top(order.spare().top());
  }
  // How many of `want` ids to take from a victim.
  std::uint64_t at_once(Index node, std::size_t column, std::uint64_t want, OwnerId asker) const {
    if (asker == kEverybody) return want;
    const OwnerId owner = owners().of(node);
    const std::uint64_t over = owners().beyond_maximum(owner, column, owner == asker ? want : 0);
    const std::uint64_t spare = owners().beyond_guarantee(owner, column);
    return over ? std::min(want, over) : spare ? std::min(want, spare) : want;
  }
  // Whether a victim goes because its owner has, or asks for, more than its maximum.
  bool is_beyond(Index node, std::size_t column, std::uint64_t want, OwnerId asker) const {
    const OwnerId owner = owners().of(node);
    return owners().beyond_maximum(owner, column, owner == asker ? want : 0) > 0;
  }
  // An owner that has more than its maximum, and how many ids of that can be evicted; 0: there is none.
  std::pair<OwnerId, std::uint64_t> beyond_maximum(std::size_t column) const {
    const Order& over = orders_[column].over();
    if (over.empty()) return {kNoOwner, 0};
    const OwnerId owner = over.top();
    return {owner, std::min(owners().beyond_maximum(owner, column), owners().evictable(owner, column))};
  }

  bool sound(std::size_t column) const { return orders_[column].spare().sound() && orders_[column].over().sound(); }
  // Whether a node is where it belongs; `rank`: that of a candidate, where it is known.
  bool sound(Index node, std::size_t column, bool candidate, const Rank* rank, std::uint32_t depth) const {
    const OwnerId owner = owners().of(node);
    const ShareOrder& order = orders_[column];
    const bool any = order.top(owner) != kNone;
    return order.contains(node, owner) == candidate &&
           order.spare().contains(owner) == (any && owners().beyond_guarantee(owner, column) > 0) &&
           order.over().contains(owner) == (any && owners().beyond_maximum(owner, column) > 0) &&
           (!rank || order.holds(node, *rank, depth));
  }

 private:
  const Owners& owners() const { return *cells_.owners(); }
  void settle(OwnerId owner, std::size_t column) noexcept { orders_[column].settle(owner, owners(), column); }

  const Residency& cells_;
  std::vector<ShareOrder> orders_;  // by column
};

}  // namespace mainstem
