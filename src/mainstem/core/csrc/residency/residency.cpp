#include "residency/residency.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>

namespace mainstem {

Residency::Residency(const Structure& nodes, std::vector<Component> rows_, std::uint32_t tiers_)
    : rows(std::move(rows_)),
      tiers(tiers_),
      columns(rows.size() * tiers),
      single_cell(columns == 1 && rows[0].leaf_only()),
      nodes_(nodes) {
  require(tiers >= 1 && tiers <= kMaxTiers, "tiers", tiers, "1 to 3");
  require(!rows.empty() && rows.size() <= kMaxComponents, "components", rows.size(), "1 to 8 of them");
  for (std::size_t column = 0; column < columns; ++column)
    component_of_column_.push_back(rows[component_index(column)]);
  counts_.resize(columns);
  rooms_.resize(columns);
}

std::size_t Residency::bytes() const {
  std::size_t total = cells_.bytes() + pins_.bytes() + retained_.bytes();
  for (const Cell& c : cells_)
    total += c.ids.heap_bytes();
  return total;
}

// ---------------------------------------------------------------- what a node holds

bool Residency::empty(Index node) const {
  for (std::size_t column = 0; column < columns; ++column)
    if (!cell(node, column).absent()) return false;
  return true;
}

bool Residency::empty_of(Index node, std::uint32_t component) const {
  for (std::uint32_t tier = 0; tier < tiers; ++tier)
    if (!cell(node, column_of(component, tier)).absent()) return false;
  return true;
}

bool Residency::empty_with_children(Index node) const {
  for (Index at = nodes_[node].first_child; at != kNone; at = nodes_[at].next)
    if (!empty(at)) return false;
  return empty(node);
}

bool Residency::unused_from(Index node) const {
  return nodes_.every_from(node, [&](Index at) {
    for (std::uint32_t tier = 0; tier < tiers; ++tier)
      if (locks_taken(at, tier)) return false;
    return empty(at);
  });
}

bool Residency::dead(Index node) const {
  return nodes_[node].branches == 0 && !pinned(node) && empty(node);
}

bool Residency::only_on(Index node, std::uint32_t tier) const {
  for (std::size_t column = 0; column < columns; ++column)
    if (tier_of(column) != tier && (!cell(node, column).absent() || pinned(node, tier_of(column)))) return false;
  return true;
}

bool Residency::has(Index node, std::size_t column, std::uint32_t begin) const {
  if (!component(column).per_page()) return node != kNone && cell(node, column).present();
  for (Index at = node; at != kNone && nodes_[at].end() > begin; at = nodes_[at].parent)
    if (!cell(at, column).present()) return false;
  return true;
}

void Residency::copy_ids(Index node, std::size_t column, std::uint32_t begin, std::int32_t* out) const {
  for (Index at = node; at != kNone && nodes_[at].end() > begin; at = nodes_[at].parent) {
    const Cell& c = cell(at, column);
    const std::uint32_t skipped = std::max(begin, nodes_[at].start) - nodes_[at].start;
    const std::uint32_t pages = nodes_[at].pages - skipped;
    std::int32_t* to = out + (nodes_[at].start + skipped - begin);
    if (component(column).per_page() && !c.absent()) {
      std::memcpy(to, c.ids.data() + skipped, pages * sizeof(std::int32_t));
    } else {
      std::fill_n(to, pages, -1);
      if (!c.absent()) to[pages - 1] = c.ids[0];
    }
  }
}

// Where a match may end. Walking down, each component keeps its coverage; a match ends at the deepest position at which
// all of them allow it. A cell counts as usable on a tier when it is present there or on a tier above.
//   full     every page from the root to here is present
//   window   the last `window` symbols are present
//   state    the position is the end of a node whose state is present
//   chunk    the last chunk's beginning is present; a boundary needs nothing, even inside a node without this cell
Reach Residency::reach(const Walk& path, std::uint32_t first) const {
  Reach reach;
  if (single_cell) {  // what the loop below finds when a match may end at any present page
    std::size_t at = 0;
    for (; at < path.size() && cell(path[at].node, 0).present(); ++at)
      reach.first += path[at].pages;
    reach.best[0] = reach.first;
    for (; at < path.size() && cell(path[at].node, 0).in_flight(); ++at)
      reach.pending += path[at].pages;
    return reach;
  }
  Covers cover{};
  bool in_flight_only = true;
  for (const Step& step : path) {
    const Node& n = nodes_[step.node];
    const std::uint32_t end = n.start + step.pages;
    bool pending = false;
    Usable usable{};
    for (std::uint32_t tier = first; tier < tiers; ++tier) {
      bool all = true;
      for (std::uint32_t c = 0; c < components(); ++c) {
        const Cell& at = cell(step.node, column_of(c, tier));
        usable[c] = usable[c] || at.present();
        pending = pending || at.in_flight();
        Coverage& coverage = cover[column_of(c, tier)];
        coverage.pass(rows[c], usable[c], end, step.pages == n.pages);
        all = all && coverage.allows(rows[c], end, nodes_.page_size);
      }
      reach.best[tier] = all ? end : std::max(reach.best[tier], last_boundary(n.start, end, tier, usable, cover));
    }
    if (cover[0].allows(rows[0], end, nodes_.page_size)) reach.first = end;
    const std::uint32_t best = reach.best[tiers - 1];
    if (best > n.start) {  // the match goes on after what seemed to end it
      in_flight_only = true;
      reach.pending = 0;
    }
    if (end > best) {
      in_flight_only = in_flight_only && pending;
      if (in_flight_only) reach.pending += end - std::max(best, n.start);
    }
  }
  reach.first = std::max(reach.first, reach.best[kDevice]);
  return reach;
}

// Returns the last page boundary inside pages [start, end) of a node at which a chunk begins that is not usable there,
// and at which every other component allows a match to end; 0 if there is none.
std::uint32_t Residency::last_boundary(std::uint32_t start, std::uint32_t end, std::uint32_t tier, const Usable& usable,
                                       const Covers& cover) const {
  std::uint32_t apart = 0;
  for (std::uint32_t c = 0; c < components(); ++c)
    if (!usable[c]) apart = std::max(apart, rows[c].boundary_pages(nodes_.page_size));
  if (apart == 0) return 0;
  const auto allows = [&](std::uint32_t at) {
    for (std::uint32_t c = 0; c < components(); ++c)
      if (usable[c] ? !rows[c].per_page() || !cover[column_of(c, tier)].allows(rows[c], at, nodes_.page_size)
                    : rows[c].needs_before(at, nodes_.page_size))
        return false;
    return true;
  };
  for (std::uint32_t at = (end - 1) / apart * apart; at > start; at -= apart)
    if (allows(at)) return at;
  return 0;
}

// ---------------------------------------------------------------- ids come and go

void Residency::occupy(Index node, std::size_t column, Run<std::int32_t>&& ids, Index transfer) noexcept {
  Cell& c = cell(node, column);
  assert(c.absent());
  c.ids = std::move(ids);
  c.transfer = transfer == kNone ? kHere : transfer;
  count(node, column, [&](CellCounts& counts) { counts.add(c, +1); });
  ++cell(nodes_[node].parent, column).holders;
}

Run<std::int32_t> Residency::vacate(Index node, std::size_t column) noexcept {
  Cell& c = cell(node, column);
  assert(!c.absent() && (c.in_flight() || c.locks == 0));
  count(node, column, [&](CellCounts& counts) { counts.add(c, -1); });
  c.transfer = kNone;
  --cell(nodes_[node].parent, column).holders;
  return std::move(c.ids);
}

void Residency::arrive(Index node, std::size_t column) noexcept {
  Cell& c = cell(node, column);
  count(node, column, [&](CellCounts& counts) { counts.add(c, -1); });
  c.transfer = kHere;
  count(node, column, [&](CellCounts& counts) { counts.add(c, +1); });
}

void Residency::drop_back(Index node, std::size_t column, std::uint32_t pages, Ids* freed) {
  Cell& c = cell(node, column);
  const std::int32_t* end = c.ids.data() + c.ids.size();
  freed->insert(freed->end(), end - pages, end);
  c.ids.drop_back(pages);
  count(node, column, [&](CellCounts& counts) { counts.present -= pages; });
}

// ---------------------------------------------------------------- locks and pins

bool Residency::lock(Index node, std::size_t column, int by) {
  Cell& c = cell(node, column);
  const bool before = c.locks > 0;
  assert(by > 0 || c.locks > 0);
  c.locks += static_cast<std::uint32_t>(by);
  const bool after = c.locks > 0;
  if (before == after) return false;
  const std::uint64_t ids = after ? c.ids.size() : std::uint64_t{} - c.ids.size();
  if (c.present()) count(node, column, [&](CellCounts& counts) { counts.locked += ids; });
  return c.holders == 0 || !component(column).leaf_only();  // others are never candidates, locked or not
}

bool Residency::pinned(Index node) const {
  for (std::uint32_t tier = 0; tier < tiers; ++tier)
    if (pinned(node, tier)) return true;
  return false;
}

std::uint32_t Residency::locks_taken(Index node, std::uint32_t tier) const {
  const std::uint32_t pins = pins_[std::size_t{node} * tiers + tier];
  if (tier != kDevice || detached_.empty()) return pins;
  const auto found = detached_.find(node);
  return pins - (found == detached_.end() ? 0 : found->second);
}

void Residency::pin_for_detached(Index parent) noexcept {
  pin(parent, kDevice, +1);
  ++detached_[parent];
}

void Residency::unpin_for_detached(Index parent) noexcept {
  pin(parent, kDevice, -1);
  if (--detached_[parent] == 0) detached_.erase(parent);
}

// ---------------------------------------------------------------- retention

IdCounts Residency::retain(Index node, std::uint32_t tier, int by) noexcept {
  IdCounts alone{};
  for (std::uint32_t c = 0; c < components(); ++c) {
    const std::size_t column = column_of(c, tier);
    const auto count = [&](Index at) {
      std::uint32_t& times = retained_[std::size_t{at} * columns + column];
      assert(by > 0 || times > 0);
      if (std::max(times, times + by) == 1) alone[c] += rows[c].ids(nodes_[at].pages);
      times += static_cast<std::uint32_t>(by);
    };
    if (!rows[c].per_page()) {
      count(node);
      continue;
    }
    const std::uint32_t first = first_locked(node, column);
    for (Index at = node; !nodes_[at].root() && nodes_[at].start >= first; at = nodes_[at].parent)
      count(at);
  }
  return alone;
}

IdCounts Residency::would_retain(const Walk& path, std::uint32_t tier) const {
  IdCounts more{};
  const Step& last = path.back();
  const std::uint32_t end = nodes_[last.node].start + last.pages;
  for (std::uint32_t c = 0; c < components(); ++c) {
    const std::size_t column = column_of(c, tier);
    if (!rows[c].per_page()) {
      more[c] = last.pages < nodes_[last.node].pages || !retained(last.node, column);
      continue;
    }
    const std::uint32_t first = rows[c].first_locked(end, nodes_.page_size);
    for (const Step& step : path) {
      const std::uint32_t begin = std::max(first, nodes_[step.node].start);
      const std::uint32_t until = nodes_[step.node].start + step.pages;
      if (begin < until && !retained(step.node, column)) more[c] += until - begin;
    }
  }
  return more;
}

// ---------------------------------------------------------------- owners

std::unique_ptr<Owners> Residency::share_out(Shares others, const std::map<std::string, Shares>& named) {
  auto owners = std::make_unique<Owners>(columns, std::move(others), named);
  owners->reserve(cells_.size() / columns);
  for (Index node = 1; node < nodes_.nodes().size(); ++node) {
    const Node& n = nodes_[node];
    if (!n.live) continue;
    owners->own(node, n.removed ? kNoOwner : owners->enter(text(nodes_[nodes_.root_of(node)].key)));
    for (std::size_t column = 0; column < columns; ++column)
      owners->count(node, column, [&](CellCounts& counts) { counts.add(cell(node, column), +1); });
  }
  return std::exchange(owners_, std::move(owners));
}

void Residency::disown(Index node) noexcept {
  if (!owners_) return;
  for (std::size_t column = 0; column < columns; ++column)
    owners_->count(node, column, [&](CellCounts& counts) { counts.add(cell(node, column), -1); });
  owners_->disown(node);
  owners_->own(node, kNoOwner);
  for (std::size_t column = 0; column < columns; ++column)
    owners_->count(node, column, [&](CellCounts& counts) { counts.add(cell(node, column), +1); });
}

// ---------------------------------------------------------------- nodes come, go, are split and joined

void Residency::reserve(std::size_t nodes) {
  cells_.resize(nodes * columns);
  pins_.resize(nodes * tiers);
  if (!retained_.empty()) retained_.resize(nodes * columns);
  if (owners_) owners_->reserve(nodes);
}

void Residency::free(Index node) noexcept {
  for (std::size_t column = 0; column < columns; ++column) {
    cell(node, column) = Cell{};
    if (!retained_.empty()) retained_[std::size_t{node} * columns + column] = 0;
  }
  if (owners_) owners_->disown(node);
}

void Residency::make_room_to_split(Index node, std::uint32_t pages) {
  for (std::size_t column = 0; column < columns; ++column)
    if (component(column).per_page() && !cell(node, column).absent())
      rooms_[column] = cell(node, column).ids.room(pages);
}

// A split treats each cell, on every tier, by its component:
//   full, window   the upper half takes the first ids, and joins the transfer if they are in flight
//                  its locks are those of the lower half: a lock of full attention passes through it, and the lock of a
//                  window begins at a node boundary, so that it covers both halves or ends between nodes
//   state          stays with the lower half, with its locks; the upper half has none
void Residency::split(Index upper, Index lower) noexcept {
  if (owners_) owners_->own(upper, owners_->of(lower));
  for (std::size_t column = 0; column < columns; ++column) {
    Cell& low = cell(lower, column);
    Cell& up = cell(upper, column);
    up.holders = low.absent() ? 0 : 1;
    if (component(column).per_page()) {
      up.locks = low.locks;
      up.transfer = low.transfer;
      if (!retained_.empty())
        retained_[std::size_t{upper} * columns + column] = retained_[std::size_t{lower} * columns + column];
      if (!low.absent()) up.ids = low.ids.take_front(nodes_[upper].pages, std::move(rooms_[column]));
    } else if (!low.absent()) {
      --cell(nodes_[upper].parent, column).holders;
    }
  }
}

// Both must hold the same cells, none in flight, with the same locks. No lock may end between them, and no state may
// lie there.
bool Residency::may_join(Index upper, Index lower) const {
  if (pinned(upper)) return false;
  for (std::size_t column = 0; column < columns; ++column) {
    const Cell& up = cell(upper, column);
    const Cell& low = cell(lower, column);
    if (component(column).per_page() ? up.in_flight() || up.transfer != low.transfer || up.locks != low.locks
                                     : !up.absent())
      return false;
  }
  return true;
}

void Residency::make_room_to_join(Index upper, Index lower) {
  for (std::size_t column = 0; column < columns; ++column)
    rooms_[column] =
        cell(upper, column).ids.room_after(cell(lower, column).ids.size(), Structure::kJoinedBytes / nodes_.page_bytes);
}

// The reverse of a split; the nodes are joined already.
void Residency::join(Index upper, Index lower) noexcept {
  for (std::size_t column = 0; column < columns; ++column) {
    Cell& up = cell(upper, column);
    Cell& low = cell(lower, column);
    if (component(column).per_page()) {
      up.ids.append(low.ids, std::move(rooms_[column]));
      low.ids = std::move(up.ids);
    } else if (!low.absent()) {
      ++cell(nodes_[lower].parent, column).holders;
    }
  }
}

// ---------------------------------------------------------------- check

void Residency::check() const {
  check_locks();
  for (std::size_t column = 0; column < columns; ++column)
    check_counts(column);
}

void Residency::check_node(Index node) const {
  const Node& n = nodes_[node];
  std::vector<Index> detached;
  for (Index at = 1; pinned(node, kDevice) && at < nodes_.nodes().size(); ++at)
    if (nodes_[at].live && nodes_[at].parent == node && nodes_[at].detached) detached.push_back(at);
  if (pins_[std::size_t{node} * tiers] != locks_taken(node, kDevice) + detached.size())
    broken(node, "a detached node pins its parent");
  const auto noted = detached_.find(node);
  if (pinned(node, kDevice) && (noted == detached_.end() ? 0 : noted->second) != detached.size())
    broken(node, "detached children are counted");
  if (n.root() && n.branches == 0 && !pinned(node, kDevice)) broken(node, "a root has at least one child");
  if (!n.root() && dead(node)) broken(node, "a node has a cell, a child or a lock");
  for (std::size_t column = 0; column < columns; ++column) {
    const Cell& c = cell(node, column);
    const std::size_t expected = c.absent() ? 0 : component(column).ids(n.pages);
    if (c.ids.size() != expected) broken(node, "a cell has an id for each page, or none");
    if (c.in_flight() && (c.transfer >= nodes_.nodes().size() || !nodes_[c.transfer].live))
      broken(node, "a cell in flight names its transfer");
    if (n.root() && !c.absent()) broken(node, "a root holds no pages");
    std::uint32_t holders = 0;
    for (Index at = n.first_child; at != kNone; at = nodes_[at].next)
      holders += !cell(at, column).absent();
    if (component(column).leaf_only() && c.absent() && holders > 0 && !n.root() && !n.removed)
      broken(node, "a child holds a cell only if its parent does");
    for (const Index at : detached)
      holders += !cell(at, column).absent();
    if (holders != c.holders) broken(node, "children that hold a cell are counted");
  }
  if (!retained_.empty()) check_retention(node);
}

void Residency::check_retention(Index node) const {
  const auto times = [&](Index at, std::size_t column) { return retained_[std::size_t{at} * columns + column]; };
  for (std::size_t column = 0; column < columns; ++column) {
    if (times(node, column) > cell(node, column).locks) broken(node, "what is retained is locked");
    if (!component(column).leaf_only() || nodes_[node].root()) continue;
    std::uint32_t below = 0;
    for (Index at = nodes_[node].first_child; at != kNone; at = nodes_[at].next)
      below += times(at, column);
    if (times(node, column) < below) broken(node, "what a prefix needs is retained with it");
  }
}

// Counts locks from nothing: what pins and transfers hold must be what the cells say.
void Residency::check_locks() const {
  std::vector<std::uint32_t> expected(cells_.size(), 0);
  const auto hold = [&](Index node, std::uint32_t tier, std::uint32_t times) {
    for (std::uint32_t c = 0; c < components(); ++c) {
      const std::size_t column = column_of(c, tier);
      if (!rows[c].per_page()) {
        expected[std::size_t{node} * columns + column] += times;
        continue;
      }
      const std::uint32_t first = first_locked(node, column);
      Index at = node;
      for (; !nodes_[at].root() && nodes_[at].start >= first; at = nodes_[at].parent)
        expected[std::size_t{at} * columns + column] += times;
      if (nodes_[at].end() > first) broken(node, "a window lock begins at a node boundary");
    }
  };
  for (Index node = 1; node < nodes_.nodes().size(); ++node) {
    if (!nodes_[node].live) continue;
    for (std::uint32_t tier = 0; tier < tiers; ++tier) {
      std::uint32_t times = locks_taken(node, tier);
      for (std::uint32_t c = 0; c < components(); ++c)
        times += cell(node, column_of(c, tier)).transfer == node;
      if (times) hold(node, tier, times);
    }
  }
  for (Index node = 1; node < nodes_.nodes().size(); ++node)
    for (std::size_t column = 0; column < columns; ++column)
      if (cell(node, column).locks != expected[std::size_t{node} * columns + column])
        broken(node, "locks add up along the path");
}

void Residency::check_counts(std::size_t column) const {
  CellCounts sum;
  std::unordered_set<std::int32_t> seen;
  for (Index node = 1; node < nodes_.nodes().size(); ++node) {
    const Cell& c = cell(node, column);
    sum.add(c, +1);
    for (std::size_t i = 0; i < c.ids.size(); ++i)
      if (!seen.insert(c.ids[i]).second) broken(node, "page " + std::to_string(c.ids[i]) + " has one owner");
  }
  if (sum != counts_[column]) broken(kNone, "pages are counted");
  if (owners_) check_owners(column);
}

void Residency::check_owners(std::size_t column) const {
  std::vector<CellCounts> sums(owners_->size());
  std::vector<std::size_t> owned(owners_->size());
  std::uint64_t available = 0;
  for (Index node = 1; node < nodes_.nodes().size(); ++node) {
    const Node& n = nodes_[node];
    if (!n.live) continue;
    const OwnerId owner = owners_->of(node);
    if (owner != (n.removed ? kNoOwner : owners_->find(text(nodes_[nodes_.root_of(node)].key))))
      broken(node, "a node has the owner of its namespace, or nobody once it is removed");
    sums[owner].add(cell(node, column), +1);
    ++owned[owner];
  }
  if (!owners_->sound(owned)) broken(kNone, "an owner has a number as long as it has nodes or shares of its own");
  for (OwnerId owner = 0; owner < sums.size(); ++owner) {
    if (sums[owner] != owners_->counts(owner, column)) broken(kNone, "the pages of each owner are counted");
    const std::uint64_t evictable = sums[owner].present - sums[owner].locked;
    available += std::min(evictable, owners_->beyond_guarantee(owner, column));
  }
  if (available != owners_->available(kNoOwner, column)) broken(kNone, "what owners yield to others adds up");
}

}  // namespace mainstem
