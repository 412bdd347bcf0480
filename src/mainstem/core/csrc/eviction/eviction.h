// Eviction: the order in which nodes lose their pages. The tree reports every arrival, use, departure, split and join;
// Eviction answers which node is next, which nodes may be joined, and where a cell must be split. It reads nodes and
// cells, and writes the fields that rank a node: recency, hits, priority.
//
// Each column has an order of its candidates. The cells of full attention rank by the policy. A window or a state has a
// standing of its own, since a match that passes over it does not use it. A policy that remembers more than the node
// shows has an object for each column of the first component (replacement.h); other policies have none.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "eviction/expected.h"
#include "eviction/order.h"
#include "eviction/policy.h"
#include "eviction/share_order.h"
#include "residency/residency.h"
#include "structure/structure.h"

namespace mainstem {

// A window page is worth 1 in the window of an inserted prefix, until that grows; 2 in the window of a matched prefix;
// else 0. For the worth of a state see credit() in eviction.cpp.
inline constexpr double kInserted = 1, kMatched = 2;

// kSuperseded: the part of its savings that a superseded state counts, since few sequences go back. kAging: how far the
// inflation follows the worth of an evicted state; GreedyDual has 1, which forgets long prompts too soon. See
// docs/decisions.md for measurements.
inline constexpr double kSuperseded = 0.1, kAging = 0.1;

struct Standing {
  double worth = 0;
  double base = 0;          // of a state: the inflation when it was filled or last used
  Tick used;                // when the cell was filled, or when a match last needed it
  bool superseded = false;  // of a state: its sequence has grown past it
  std::uint8_t uses = 0;    // of a state: matches that ended here, as far as they can be counted
};

// Advice on the next use orders the pages of full attention on the device.
inline constexpr std::size_t kAdvised = 0;

class Eviction {
 public:
  Eviction(Structure& nodes, const Residency& cells, std::string_view policy, std::uint32_t protected_hits);
  Eviction(const Eviction&) = delete;
  Eviction& operator=(const Eviction&) = delete;

  bool ranks_itself() const { return policy_.rank != nullptr; }  // false: ranks come from outside
  bool remembers() const { return remembers_; }
  bool listens() const { return remembers_ || expected_; }  // asked() wants to know
  bool has_standings() const { return has_standings_; }
  void advance() { ++tick_; }  // a match or an insertion begins
  std::uint64_t tick() const { return tick_; }
  // Whether `accessed` is when each node was last used: a join may not mix two of them.
  bool tells_recency() const;

  // ---- owners, where each has its share (residency/owners.h)
  void share_out();  // they have other shares from now on
  ShareOrders* shares() { return shares_.get(); }
  const ShareOrders* shares() const { return shares_.get(); }

  // ---- nodes come, go, are split and joined
  void reserve(std::size_t nodes);
  void made(Index node, std::int32_t priority) noexcept;
  void renew(Index node, std::int32_t priority) noexcept;  // a node that held nothing begins anew
  void split(Index upper, Index lower) noexcept;
  bool may_join(Index upper, Index lower) const;
  void join(Index upper, Index lower) noexcept;
  void inherit(Index node, std::uint64_t accessed) noexcept;  // a child that was used up to then is gone

  // ---- ids come and go
  void came(Index node, std::size_t column) noexcept;     // the cell is not absent any more
  void arrived(Index node, std::size_t column) noexcept;  // it was in flight and is present
  void gone(Index node, std::size_t column, bool was_present) noexcept;
  void trim(Index node, std::uint32_t tier,
            std::uint32_t pages) noexcept;                // it is about to lose its last pages of key and name
  void refresh(Index node, std::size_t column) noexcept;  // its locks, or its standing, have changed
  void refresh(Index node) noexcept;                      // in all columns

  // ---- use
  void asked(std::string_view ns, const Walk& path, Bytes key) noexcept;
  void found(const Walk& path) noexcept;                              // a match includes these nodes
  void ended(Index node, std::size_t column, double worth) noexcept;  // a match, or an insertion, ends here
  void end_window(Index node, std::size_t column, double worth) noexcept;
  void pass_window(Index node, std::size_t column) noexcept;  // the prefix that ended here has grown
  void visited(Index node, std::int32_t priority) noexcept;   // an insertion goes through the node
  void in_use(Index node, std::uint32_t tier) noexcept;       // a lock has kept it until now
  // It goes first on the first `tiers` tiers, until it is found or visited.
  void demote(Index node, std::uint32_t tiers) noexcept;
  // Somebody expects it to be used next at `due`, see expected.h. From the first time on, nodes have names.
  void expect(Index node, Account account, double now, double due);
  void note_time(double now) {
    if (expected_) expected_->note_time(now);
  }
  const Expected* expected() const { return expected_.get(); }

  // ---- what goes next
  // For whom room is made, and for how many ids, matters only with shares. Owners beyond their maxima give way first,
  // and the owner itself if it would be; then the policy decides between those beyond their guarantees; then the owner
  // itself gives way. kNone: there is no candidate, or it waits for a rank.
  Index victim(std::size_t column, OwnerId owner, std::uint64_t want);
  // How many ids of a victim to take before the next one is chosen.
  std::uint64_t at_once(Index node, std::size_t column, std::uint64_t want, OwnerId owner) const;
  // How many pages of a window's cell go together: those before the window that ends at the node, if there are any.
  std::uint32_t pages_together(Index node, std::size_t column) const;
  void evicted(Index node, std::size_t column) noexcept;            // the victim is about to go
  void done(std::size_t column) noexcept;                           // an eviction ends
  Index first_removed(std::size_t column) const;                    // a candidate that was removed, or kNone
  std::uint32_t saved_pages(Index node, std::size_t column) const;  // need not be computed, because a state lies here
  // How many of the first pages to come may be one node: those with one past.
  std::uint32_t alike_pages(std::uint64_t name, std::uint32_t tier, std::uint32_t depth, Bytes pages) noexcept {
    return replacement(cells_.column_of(0, tier))->alike_pages(name, depth, pages);
  }
  std::uint64_t name(Index node) const { return names_[node]; }

  // Policy "external".
  Index unranked(std::size_t column) const;
  void rank(Index node, std::size_t column, Rank rank);

  std::size_t bytes() const;
  void check() const;
  void check_node(Index node) const;

 private:
  friend struct Probe;
  friend class Lookahead;

  std::uint64_t name_of(const Node& node) const;  // from the one above
  // The rank and the place of a node as if it had last been used at `accessed`.
  Rank rank_of(Index node, std::size_t column, std::uint64_t accessed) const;
  Rank rank_by_standing(Index node, std::size_t column, std::uint64_t accessed) const;
  Place place_of(Index node, std::size_t column, std::uint64_t accessed) const;
  bool is_demoted(Index node, std::size_t column) const {
    return cells_.tier_of(column) < nodes_[node].demoted && !nodes_[node].removed;
  }
  bool goes_first(Index node, std::size_t column) const;
  void put(Index node, std::size_t column);
  void drop(Index node, std::size_t column);
  void put_in_queue(Index node, std::size_t column);
  void drop_from_queue(Index node, std::size_t column);
  void touch(Index node, std::uint64_t tick);
  void credit(Index node, std::size_t column);
  double worth_of_state(Index node, std::size_t column) const;
  Index outgrown(Index node, std::size_t column) const;
  void supersede_above(Index node, std::size_t column);
  void restore_above(Index node, std::size_t column);
  void reassess(std::size_t column);
  void note_standing(Index node, std::size_t column);
  Index choose(std::size_t column);
  std::uint64_t used(Index node, std::size_t column) const;
  Standing& standing(Index node, std::size_t column) { return standings_[std::size_t{node} * cells_.columns + column]; }
  const Standing& standing(Index node, std::size_t column) const {
    return standings_[std::size_t{node} * cells_.columns + column];
  }
  Replacement* replacement(std::size_t column) const { return remembers_ ? replacements_[column].get() : nullptr; }
  Queues queues(std::size_t column) const { return {&orders_[column], cells_.columns, queue_count_}; }
  Order& order(std::size_t column, std::uint32_t queue) { return orders_[queue * cells_.columns + column]; }

  Structure& nodes_;
  const Residency& cells_;
  const Policy policy_;
  const std::uint32_t protected_hits_;  // for slru
  const bool remembers_;
  const bool has_standings_;  // there are windows or states
  bool has_one_order_;        // of each column: nothing else is to be kept up to date
  std::uint64_t tick_ = 0;
  std::size_t room_ = 0;       // nodes that there is memory for
  std::vector<Order> orders_;  // by queue, then by column
  std::uint32_t queue_count_ = 1;
  Array<Standing> standings_;                               // by node, then by column
  std::vector<double> inflation_;                           // by column: follows the worth of evicted states
  Array<std::uint64_t> names_;                              // by node, where the policy remembers, or advice is given
  std::vector<std::unique_ptr<Replacement>> replacements_;  // by column; null: ranks
  std::unique_ptr<ShareOrders> shares_;                     // none: owners have no shares
  std::unique_ptr<Expected> expected_;                      // null: nobody has given advice
};

}  // namespace mainstem
