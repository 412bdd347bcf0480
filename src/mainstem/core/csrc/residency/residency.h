// Residency: which ids each node holds, by component and tier, and what keeps them there: locks, pins and transfers. It
// knows the nodes and their links. It knows no keys and no policy.
//
// A column is a component on a tier; a node has a cell for each. Everything that can fail comes before any change, in
// reserve(), make_room_to_split() and make_room_to_join().
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "residency/cell.h"
#include "residency/component.h"
#include "residency/owners.h"
#include "structure/structure.h"

namespace mainstem {

using Ids = std::vector<std::int32_t>;
using IdSpan = std::span<const std::int32_t>;

constexpr std::size_t kMaxComponents = 8;
constexpr std::size_t kMaxTiers = 3;
constexpr std::uint32_t kDevice = 0, kHost = 1;  // the third is storage, in a replay; a cache stores pages by name

using IdCounts = std::array<std::uint64_t, kMaxComponents>;  // ids by component

struct Reach {                                  // in pages
  std::array<std::uint32_t, kMaxTiers> best{};  // by tier: how far a match goes over this tier and those above
  std::uint32_t first = 0;                      // the first component alone, on the device
  std::uint32_t pending = 0;                    // in flight after the match
};

class Residency {
 public:
  Residency(const Structure& nodes, std::vector<Component> rows, std::uint32_t tiers);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  const std::vector<Component> rows;
  const std::uint32_t tiers;
  const std::size_t columns;
  const bool single_cell;  // full attention on one tier: only leaves can be evicted, and a match may end anywhere

  // ---- addresses
  std::uint32_t components() const { return static_cast<std::uint32_t>(rows.size()); }
  std::size_t column_of(std::uint32_t component, std::uint32_t tier) const { return component * tiers + tier; }
  std::uint32_t tier_of(std::size_t column) const { return static_cast<std::uint32_t>(column % tiers); }
  std::uint32_t component_index(std::size_t column) const { return static_cast<std::uint32_t>(column / tiers); }
  const Component& component(std::size_t column) const { return component_of_column_[column]; }
  Cell& cell(Index node, std::size_t column) { return cells_[std::size_t{node} * columns + column]; }
  const Cell& cell(Index node, std::size_t column) const { return cells_[std::size_t{node} * columns + column]; }
  void require_tier(std::uint32_t tier) const {
    if (tier >= tiers) throw BadValue{"tier", std::to_string(tier), "below " + std::to_string(tiers)};
  }
  std::size_t find_column(std::uint32_t component, std::uint32_t tier) const {  // of a caller's numbers
    require_tier(tier);
    if (component < components()) return column_of(component, tier);
    throw BadValue{"component", std::to_string(component), "below " + std::to_string(components())};
  }
  // The first page that a match ending at this node needs, and that a lock there holds.
  std::uint32_t first_needed(Index node, std::size_t column) const {
    return component(column).first_needed(nodes_[node].end(), nodes_.page_size);
  }
  std::uint32_t first_locked(Index node, std::size_t column) const {
    return component(column).first_locked(nodes_[node].end(), nodes_.page_size);
  }

  // ---- what a node holds
  bool candidate(Index node, std::size_t column) const {  // can it be evicted
    const Cell& c = cell(node, column);
    return c.present() && c.locks == 0 && !(component(column).leaf_only() && c.holders > 0);
  }
  bool empty(Index node) const;
  bool empty_of(Index node, std::uint32_t component) const;
  bool empty_with_children(Index node) const;  // neither the node nor its children hold anything
  bool unused_from(Index node) const;          // nothing is held or locked here or below, as after a cancelled transfer
  bool dead(Index node) const;                 // no child, no pin and no cell: the node may go
  bool only_on(Index node, std::uint32_t tier) const;
  bool has(Index node, std::size_t column, std::uint32_t begin) const;
  void copy_ids(Index node, std::size_t column, std::uint32_t begin, std::int32_t* out) const;
  const CellCounts& counts(std::size_t column) const { return counts_[column]; }
  // How many ids can be evicted for an owner; without shares, for anybody.
  std::uint64_t available(std::size_t column, OwnerId owner) const {
    return owners_ ? owners_->available(owner, column) : counts_[column].present - counts_[column].locked;
  }
  // Where a match may end, over the tiers from `first` down.
  Reach reach(const Walk& path, std::uint32_t first = kDevice) const;

  // ---- ids come and go
  // Puts ids into an absent cell: present, or in flight with the name of `transfer`.
  void occupy(Index node, std::size_t column, Run<std::int32_t>&& ids, Index transfer) noexcept;
  Run<std::int32_t> vacate(Index node, std::size_t column) noexcept;
  void arrive(Index node, std::size_t column) noexcept;                             // in flight -> present
  void drop_back(Index node, std::size_t column, std::uint32_t pages, Ids* freed);  // `freed` has room

  // ---- locks and pins
  // Adds (+1) or removes (-1) one lock. Returns whether that may have made the node a candidate, or no candidate.
  bool lock(Index node, std::size_t column, int by);
  // Locks (+1) or unlocks (-1) the prefix that ends at `node`, below `stop`; `changed` is called with each
  // node that may have become a candidate, or is none any more.
  template <class Changed>
  void lock_path(Index node, Index stop, std::size_t column, int by, Changed changed);
  bool pinned(Index node, std::uint32_t tier) const { return pins_[std::size_t{node} * tiers + tier] > 0; }
  bool pinned(Index node) const;
  void pin(Index node, std::uint32_t tier, int by) {
    pins_[std::size_t{node} * tiers + tier] += static_cast<std::uint32_t>(by);
  }
  // Pins that lock() took; the others are those of detached children.
  std::uint32_t locks_taken(Index node, std::uint32_t tier) const;
  // A detached child pins its parent, which therefore outlives it. After expect_detached() that cannot fail.
  void expect_detached(Index parent) { detached_.try_emplace(parent, 0); }
  void pin_for_detached(Index parent) noexcept;
  void unpin_for_detached(Index parent) noexcept;

  // ---- retention: locks that end with time. They are counted beside the others, so that what several of them keep
  // counts once.
  bool retained(Index node, std::size_t column) const {
    return !retained_.empty() && retained_[std::size_t{node} * columns + column] > 0;
  }
  void expect_retention() { retained_.resize(cells_.size()); }  // retain() cannot fail after this
  // Counts one retention more (+1) or less (-1) of the prefix that ends at a node, which is locked. Returns how many
  // ids, by component, it alone keeps: each page counts as one, present or not.
  IdCounts retain(Index node, std::uint32_t tier, int by) noexcept;
  // How many it would keep alone if one more ended where this path does.
  IdCounts would_retain(const Walk& path, std::uint32_t tier) const;

  // ---- owners, where each has its share
  // Returns the owners before, if any, which the second one puts back.
  std::unique_ptr<Owners> share_out(Shares others, const std::map<std::string, Shares>& named);
  void share_out(std::unique_ptr<Owners> owners) noexcept { owners_ = std::move(owners); }
  const Owners* owners() const { return owners_.get(); }
  OwnerId enter(std::string_view ns) { return owners_ ? owners_->enter(ns) : kNoOwner; }
  OwnerId find_owner(std::string_view ns) const { return owners_ ? owners_->find(ns) : kNoOwner; }
  void own(Index node, OwnerId owner) noexcept {
    if (owners_) [[unlikely]]
      owners_->own(node, owner);
  }
  void disown(Index node) noexcept;  // what was removed is nobody's

  // ---- nodes come, go, are split and joined
  void reserve(std::size_t nodes);
  void free(Index node) noexcept;
  void make_room_to_split(Index node, std::uint32_t pages);
  void split(Index upper, Index lower) noexcept;
  bool may_join(Index upper, Index lower) const;
  void make_room_to_join(Index upper, Index lower);
  void join(Index upper, Index lower) noexcept;

  std::size_t bytes() const;
  void check() const;
  void check_node(Index node) const;

 private:
  friend struct Probe;

  using Covers = std::array<Coverage, kMaxComponents * kMaxTiers>;  // by column
  using Usable = std::array<bool, kMaxComponents>;                  // by component, on a tier and those above

  template <class Change>
  void count(Index node, std::size_t column, Change change) {
    change(counts_[column]);
    if (owners_) [[unlikely]]
      owners_->count(node, column, change);
  }
  std::uint32_t last_boundary(std::uint32_t start, std::uint32_t end, std::uint32_t tier, const Usable& usable,
                              const Covers& cover) const;
  void check_retention(Index node) const;
  void check_locks() const;
  void check_counts(std::size_t column) const;
  void check_owners(std::size_t column) const;

  const Structure& nodes_;
  std::vector<Component> component_of_column_;
  Array<Cell> cells_;                                  // by node, then by column
  Array<std::uint32_t> pins_;                          // by node, then by tier
  Array<std::uint32_t> retained_;                      // by node, then by column; empty: nothing ever was
  std::unordered_map<Index, std::uint32_t> detached_;  // nodes with detached children, and how many
  std::vector<CellCounts> counts_;                     // by column
  std::unique_ptr<Owners> owners_;                     // none: there are no shares
  std::vector<Run<std::int32_t>::Room> rooms_;         // by column, for ids that are about to be split or joined
};

template <class Changed>
void Residency::lock_path(Index node, Index stop, std::size_t column, int by, Changed changed) {
  if (!component(column).per_page()) {
    if (lock(node, column, by)) changed(node);
    return;
  }
  const std::uint32_t first = first_locked(node, column);
  for (; node != stop && !nodes_[node].root() && nodes_[node].start >= first; node = nodes_[node].parent)
    if (lock(node, column, by)) changed(node);
}

}  // namespace mainstem
