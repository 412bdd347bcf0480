// Locks and transfers: what must not be evicted, and what is in flight.
#include <cassert>

#include "tree.h"

namespace mainstem {

void Tree::change_locks(Index node, std::size_t slot, int by) {
  Cell& c = cell(node, slot);
  const bool before = c.locks > 0;
  assert(by > 0 || c.locks > 0);
  c.locks += static_cast<std::uint32_t>(by);
  const bool after = c.locks > 0;
  if (before == after) return;
  if (c.present()) {
    if (after)
      counts_[slot].locked += c.ids.size();
    else
      counts_[slot].locked -= c.ids.size();
  }
  if (c.holders == 0 || !row(slot).leaf_only()) refresh(node, slot);  // other cells are in no order, locked or not
}

// Makes a node on the path to `node` end before a page.
void Tree::split_at(Index node, std::uint32_t page) {
  while (nodes_[node].start > page)
    node = nodes_[node].parent;
  if (nodes_[node].start < page && page < nodes_[node].end()) split(node, page - nodes_[node].start);
}

// A window lock begins at a node boundary, so that it covers exactly the pages it needs (split 3).
void Tree::split_at_window(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  split_at(node, row(slot).first_needed(nodes_[node].end(), page_size_));
}

// Locks (+1) or unlocks (-1) what a match ending at `node` needs, below `stop`.
void Tree::lock_path(Index node, Index stop, std::size_t slot, int by) {
  if (!row(slot).per_page()) {
    change_locks(node, slot, by);
    return;
  }
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  while (node != stop && !nodes_[node].root() && nodes_[node].start >= first) {
    change_locks(node, slot, by);
    node = nodes_[node].parent;
  }
}

// A lock, or a transfer in flight, holds all components of a prefix on one tier.
void Tree::lock_all(Index node, std::uint32_t tier, int by) {
  for (std::uint32_t c = 0; c < rows_.size() && by > 0; ++c)
    split_at_window(node, slot(c, tier));
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    lock_path(node, kNone, slot(c, tier), by);
}

void Tree::lock(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  if (node == kNone) return;
  lock_all(node, tier, +1);
  ++pins(node, tier);
}

void Tree::unlock(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  if (node == kNone) return;
  if (locks_taken(node, tier) == 0) throw NotLocked{handle};
  --pins(node, tier);
  lock_all(node, tier, -1);
  if (dead(node))
    reap(node);
  else
    release_boundary(node);
}

void Tree::move_lock(Handle from_handle, Handle to_handle, std::uint32_t tier) {
  require_tier(tier);
  const Index from = resolve(from_handle);
  const Index to = resolve(to_handle);
  if (from == to) return;
  if (from != kNone && locks_taken(from, tier) == 0) throw NotLocked{from_handle};
  if (from == kNone || to == kNone) {
    lock(to_handle, tier);
    unlock(from_handle, tier);
    return;
  }
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    split_at_window(to, slot(c, tier));
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (rows_[c].locks_to_root()) {
      lock_path(to, from, s, +1);  // nodes above `from` keep their count
    } else {
      lock_path(to, kNone, s, +1);
      lock_path(from, kNone, s, -1);
    }
  }
  ++pins(to, tier);
  --pins(from, tier);
  release_boundary(from);
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    join_after(to, slot(c, tier));
}

void Tree::attach(Handle handle, std::uint32_t component, std::uint32_t tier, IdSpan ids, bool ready) {
  require_tier(tier);
  require_component(component);
  const Index node = resolve(handle);
  require(node != kNone, "node", 0, "a node with pages");
  const std::size_t s = slot(component, tier);
  const std::size_t expected = rows_[component].ids(nodes_[node].pages);
  if (ids.size() != expected) throw BadValue{"number of ids", std::to_string(ids.size()), std::to_string(expected)};
  for (const std::int32_t id : ids)
    if (id < 0) throw BadValue{"id", std::to_string(id), "0 or more"};
  if (!cell(node, s).absent()) throw BadValue{"cell", "occupied", "absent"};
  const Index parent = nodes_[node].parent;
  if (rows_[component].leaf_only() && !nodes_[parent].root() && cell(parent, s).absent())
    throw BadValue{"cell of the parent", "absent", "on the same tier before its child"};
  occupy(node, s, Run<std::int32_t>(ids.data(), ids.size()), ready ? kNone : node);
  if (ready) return;
  try {
    lock_all(node, tier, +1);
  } catch (const std::bad_alloc&) {
    for (Index at = node; cell(at, s).transfer == node; at = nodes_[at].parent)
      vacate(at, s);
    throw;
  }
}

void Tree::commit(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  bool found = false;
  for (std::uint32_t c = 0; node != kNone && c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (!cell(node, s).in_flight() || cell(node, s).transfer != node) continue;
    found = true;
    for (Index at = node; !nodes_[at].root(); at = nodes_[at].parent)
      if (cell(at, s).in_flight() && cell(at, s).transfer == node) settle(at, s);
    lock_all(node, tier, -1);
  }
  if (!found) throw BadValue{"node", std::to_string(handle), "a node whose pages are in flight on this tier"};
  join(node);
}

// Returns the first nodes of what was inserted after pages in flight, and cannot be found without them.
std::vector<Index> Tree::inserted_after(Index node, std::uint32_t tier) const {
  std::vector<Index> found;
  if (node == kNone || !rows_[0].leaf_only()) return found;
  const std::size_t s = slot(0, tier);
  for (Index at = node, from = kNone; cell(at, s).transfer == node; from = at, at = nodes_[at].parent)
    for (Index child = nodes_[at].first_child; child != kNone; child = nodes_[child].next)
      if (child != from && !nodes_[at].removed && !cell(child, s).absent()) {
        if (!subtree_only_on(child, tier))
          throw BadValue{
              "node", std::to_string(handle(node)),
              "cancelled only after nodes that follow it, here and on another tier, are cancelled or removed"};
        found.push_back(child);
      }
  return found;
}

std::vector<Ids> Tree::cancel(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  std::vector<Ids> freed(rows_.size());
  std::vector<Index> below = inserted_after(node, tier);
  bool found = false;
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    std::size_t ids = 0;
    for (Index at = node; at != kNone; at = nodes_[at].parent)
      if (cell(at, s).in_flight() && cell(at, s).transfer == node) ids += cell(at, s).ids.size();
    freed[c].reserve(ids);
  }
  for (const Index at : below)
    prepare_to_detach(at);
  for (const Index at : below)  // nothing below can fail
    detach(at);
  for (std::uint32_t c = 0; node != kNone && c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (!cell(node, s).in_flight() || cell(node, s).transfer != node) continue;
    found = true;
    lock_all(node, tier, -1);
    for (Index at = node; !nodes_[at].root(); at = nodes_[at].parent) {
      if (!cell(at, s).in_flight() || cell(at, s).transfer != node) continue;
      const Run<std::int32_t> ids = vacate(at, s);
      freed[c].insert(freed[c].begin(), ids.data(), ids.data() + ids.size());
    }
  }
  if (!found) throw BadValue{"node", std::to_string(handle), "a node whose pages are in flight on this tier"};
  reap(node);
  return freed;
}

}  // namespace mainstem
