// Eviction: evicts candidates in the order of the policy, exactly as many ids as requested.
#include <algorithm>
#include <new>
#include <utility>

#include "tree/tree.h"

namespace mainstem {

// Makes room for everything that evicting one node can free, so that taking it cannot fail.
void Tree::reserve_freed(Index node, std::vector<Ids>* freed) const {
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    Ids& ids = (*freed)[c];
    const std::size_t needed = ids.size() + cells_.rows[c].ids(nodes_[node].pages);
    if (needed > ids.capacity()) ids.reserve(needed + needed / 2);
  }
}

// Takes the last pages off a leaf that is on this tier only. Its end moves, so its handles go stale.
void Tree::trim(Index node, std::uint32_t pages, std::uint32_t tier, std::vector<Ids>* freed) {
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    const std::size_t column = cells_.column_of(c, tier);
    if (cells_.cell(node, column).absent()) continue;
    if (cells_.rows[c].per_page()) {
      cells_.drop_back(node, column, pages, &(*freed)[c]);
      if (journal_) [[unlikely]]
        journal_->left(node, column, IdSpan((*freed)[c]).last(pages));
    } else
      vacate_into(node, column, &(*freed)[c]);
  }
  eviction_.trim(node, tier, pages);
  if (ghosts_) [[unlikely]]
    ghosts_->trimmed(node, pages, eviction_.tick());
  nodes_.drop_back(node, pages);
  for (std::uint32_t c = 0; c < cells_.components(); ++c)
    eviction_.refresh(node, cells_.column_of(c, tier));
}

// Why the next victim goes.
Why Tree::reason(Index node, std::size_t column, OwnerId owner, std::uint64_t want) const {
  if (owner == kEverybody || nodes_[node].removed) return Why::removed;
  if (cells_.tier_of(column) < nodes_[node].demoted) return Why::demoted;
  return eviction_.shares() && eviction_.shares()->is_beyond(node, column, want, owner) ? Why::quota : Why::policy;
}

// Takes at most `want` ids of a component from a node. Full attention goes from the end of the node, with the other
// components' ids there; a window from the front, alone; a state alone.
void Tree::evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier,
                     std::vector<Ids>* freed) {
  const Component& row = cells_.rows[component];
  const std::size_t column = cells_.column_of(component, tier);
  const std::uint32_t pages = nodes_[node].pages;
  reserve_freed(node, freed);
  if (!row.leaf_only()) {
    if (row.per_page()) want = std::min<std::uint64_t>(want, eviction_.pages_together(node, column));
    if (row.per_page() && want < pages) node = split(node, static_cast<std::uint32_t>(want));
    vacate_into(node, column, &(*freed)[component]);
    if (cells_.dead(node)) {
      reap(node);
    } else if (!cells_.single_cell) {
      join(node);
      release_boundary(node);
    }
    return;
  }
  if (want < pages) {
    const auto taken = static_cast<std::uint32_t>(want);
    if (nodes_[node].branches == 0 && !cells_.pinned(node, tier) && cells_.only_on(node, tier)) {
      trim(node, taken, tier, freed);
      return;
    }
    split(node, pages - taken);
  }
  for (std::uint32_t c = 0; c < cells_.components(); ++c)
    if (!cells_.cell(node, cells_.column_of(c, tier)).absent())
      vacate_into(node, cells_.column_of(c, tier), &(*freed)[c]);
  if (cells_.dead(node))
    reap(node);
  else
    release_boundary(node);  // other tiers still have what was split off before: join it
}

void Tree::share_out(Shares others, const std::map<std::string, Shares>& named) {
  std::unique_ptr<Owners> before = cells_.share_out(std::move(others), named);
  try {
    eviction_.share_out();
  } catch (...) {
    cells_.share_out(std::move(before));
    throw;
  }
}

std::vector<Ids> Tree::evict(std::uint64_t want, std::uint32_t component, std::uint32_t tier,
                             std::optional<std::string_view> ns) {
  const std::size_t column = cells_.find_column(component, tier);
  const OwnerId owner = ns ? cells_.find_owner(*ns) : kEverybody;
  std::vector<Ids> freed(cells_.components());
  Ids& asked = freed[component];
  while (asked.size() < want) {
    const Index node = eviction_.victim(column, owner, want - asked.size());
    if (node == kNone) break;
    eviction_.evicted(node, column);
    if (ghosts_) [[unlikely]]
      ghosts_->expect(reason(node, column, owner, want - asked.size()), tier);
    try {
      evict_one(node, eviction_.at_once(node, column, want - asked.size(), owner), component, tier, &freed);
    } catch (const std::bad_alloc&) {
      if (asked.empty()) throw;
      break;  // keep what was freed before
    }
  }
  if (ghosts_) [[unlikely]]
    ghosts_->expect(Why::unknown, tier);
  counters_.evicted_pages += asked.size();
  if (!asked.empty()) eviction_.done(column);
  return freed;
}

Ids Tree::drop(Handle handle, std::uint64_t pages, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  if (node == kNone || !cells_.candidate(node, cells_.column_of(0, tier)))
    throw BadValue{"node", std::to_string(handle), "a candidate for eviction"};
  std::vector<Ids> freed(cells_.components());
  if (ghosts_) ghosts_->expect(Why::dropped, tier);
  if (pages) evict_one(node, pages, 0, tier, &freed);
  if (ghosts_) ghosts_->expect(Why::unknown, tier);
  counters_.evicted_pages += freed[0].size();
  return std::move(freed[0]);
}

Ids Tree::thin(Handle handle, std::uint32_t component, std::uint32_t tier, std::uint32_t limit) {
  const std::size_t column = cells_.find_column(component, tier);
  const Index node = nodes_.resolve(handle);
  Ids freed;
  for (;;) {
    std::uint32_t states = 0;
    std::uint32_t least = 0;
    bool forks = false;  // another sequence parts from this one between a state and the next one below
    Index victim = kNone;
    for (Index at = node; at != kNone && !nodes_[at].root(); at = nodes_[at].parent) {
      forks = forks || nodes_[at].children() > 1;
      const Cell& cell = cells_.cell(at, column);
      if (cell.absent()) continue;
      ++states;
      const bool shared = std::exchange(forks, false) || nodes_[at].forked;
      if (at == node || shared || !cell.present() || cell.locks) continue;
      const std::uint32_t saved = eviction_.saved_pages(at, column);
      if (victim != kNone && saved > least) continue;
      victim = at;
      least = saved;
    }
    if (states <= limit || victim == kNone) return freed;
    if (freed.empty()) freed.reserve(states);  // nothing below can fail, in later turns either
    vacate_into(victim, column, &freed);
    ++counters_.evicted_pages;
    reap(victim);
  }
}

}  // namespace mainstem
