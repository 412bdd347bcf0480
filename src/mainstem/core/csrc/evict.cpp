// Eviction: evicts candidates in the order of the policy, exactly as many ids as requested.
#include <algorithm>
#include <utility>

#include "tree.h"

namespace mainstem {

bool Tree::only_on(Index node, std::uint32_t tier) const {
  for (std::size_t s = 0; s < slots_; ++s)
    if (s % tiers_ != tier && (!cell(node, s).absent() || pins(node, static_cast<std::uint32_t>(s % tiers_)) > 0))
      return false;
  return true;
}

bool Tree::subtree_only_on(Index node, std::uint32_t tier) const {
  return every_from(node, [&](Index at) { return only_on(at, tier); });
}

// Makes room for everything that evicting one node can free, so that taking it cannot fail.
void Tree::reserve_freed(Index node, std::vector<Ids>* freed) const {
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    Ids& ids = (*freed)[c];
    const std::size_t needed = ids.size() + rows_[c].ids(nodes_[node].pages);
    if (needed > ids.capacity()) ids.reserve(needed + needed / 2);
  }
}

// Empties one cell and passes its ids to the caller.
void Tree::take_cell(Index node, std::size_t slot, Ids* freed) {
  const Run<std::int32_t> ids = vacate(node, slot);
  freed->insert(freed->end(), ids.data(), ids.data() + ids.size());
}

// Cuts the last pages off a leaf that is on this tier only. Its end moves, so its handles go stale.
void Tree::trim(Index node, std::uint32_t pages, std::uint32_t tier, std::vector<Ids>* freed) {
  Node& n = nodes_[node];
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    Cell& at = cell(node, s);
    if (at.absent()) continue;
    if (!rows_[c].per_page()) {
      take_cell(node, s, &(*freed)[c]);
      continue;
    }
    const std::int32_t* end = at.ids.data() + at.ids.size();
    (*freed)[c].insert((*freed)[c].end(), end - pages, end);
    at.ids.drop_back(pages);
    counts_[s].present -= pages;
    if (remembers_) note_gone(node, pages, s);
  }
  const std::size_t kept = std::size_t{n.pages - pages} * page_bytes_;
  if (remembers_) names_[node] = Identity::above(names_[node], n.key.data() + kept, pages, page_bytes_);
  n.key.drop_back(std::size_t{pages} * page_bytes_);
  n.pages -= pages;
  n.outdate();
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    refresh(node, slot(c, tier));
}

// Returns how many pages of a window's cell to evict at once: those before the window that ends here, if any.
std::uint32_t Tree::dispensable(Index node, std::size_t slot) const {
  const Node& n = nodes_[node];
  const std::uint32_t first = row(slot).first_needed(n.end(), page_size_);
  return standing(node, slot).worth && n.start < first ? first - n.start : n.pages;
}

void Tree::evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier,
                     std::vector<Ids>* freed) {
  const Component& row = rows_[component];
  const std::uint32_t pages = nodes_[node].pages;
  reserve_freed(node, freed);
  if (!row.from_tail()) {
    if (row.per_page()) want = std::min<std::uint64_t>(want, dispensable(node, slot(component, tier)));
    if (row.per_page() && want < pages) node = split(node, static_cast<std::uint32_t>(want));
    take_cell(node, slot(component, tier), &(*freed)[component]);
    if (dead(node)) {
      reap(node);
    } else if (!single_cell_) {
      join(node);
      release_boundary(node);
    }
    return;
  }
  if (want < pages) {
    const auto cut = static_cast<std::uint32_t>(want);
    if (nodes_[node].branches == 0 && pins(node, tier) == 0 && only_on(node, tier)) {
      trim(node, cut, tier, freed);
      return;
    }
    split(node, pages - cut);
  }
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    if (!cell(node, slot(c, tier)).absent()) take_cell(node, slot(c, tier), &(*freed)[c]);
  if (dead(node))
    reap(node);
  else
    release_boundary(node);  // other tiers still have what was cut off before: join it
}

// Returns the first candidate, or kNone.
inline Index Tree::victim(std::size_t slot) {
  if (remembers_) return spare_and_choose(slot);
  return orders_[slot].empty() ? kNone : orders_[slot].top();
}

// As victim(), after giving second chances.
Index Tree::spare_and_choose(std::size_t slot) {
  const Queues candidates = queues(slot);
  if (candidates.empty()) return kNone;
  Replacement* const at = replacement(slot);
  if (!at || (!candidates.empty(0) && goes_first(candidates.top(), slot))) return candidates.top();
  for (;;) {
    const Index node = at->victim(candidates);
    if (!at->spares(node)) return node;
    refresh(node, slot);
  }
}

Handle Tree::next_victim(std::uint32_t component, std::uint32_t tier) {
  require_tier(tier);
  require_component(component);
  const Index node = victim(slot(component, tier));
  return node == kNone || queues(slot(component, tier)).rank(node).major == kUnranked ? 0 : handle(node);
}

std::vector<Ids> Tree::evict(std::uint64_t want, std::uint32_t component, std::uint32_t tier) {
  require_tier(tier);
  require_component(component);
  std::vector<Ids> freed(rows_.size());
  Ids& asked = freed[component];
  const std::size_t s = slot(component, tier);
  while (asked.size() < want) {
    const Index node = victim(s);
    if (node == kNone || (!ranks_itself() && orders_[s].rank(node).major == kUnranked)) break;
    if (rows_[component].weighs && !nodes_[node].removed)
      inflation_[s] = std::max(inflation_[s], standing(node, s).worth);
    try {
      const std::uint64_t at_once = replacement(s) ? replacement(s)->at_once(node) : want;
      evict_one(node, std::min(at_once, want - asked.size()), component, tier, &freed);
    } catch (const std::bad_alloc&) {
      if (asked.empty()) throw;
      break;  // keep what was freed before
    }
  }
  counters_.evicted_pages += asked.size();
  if (replacement(s) && !asked.empty()) replacement(s)->settle(counts_[s].present, queues(s));
  return freed;
}

Ids Tree::drop(Handle handle, std::uint64_t pages, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  if (node == kNone || !candidate(node, slot(0, tier)))
    throw BadValue{"node", std::to_string(handle), "a candidate for eviction"};
  std::vector<Ids> freed(rows_.size());
  if (pages) evict_one(node, pages, 0, tier, &freed);
  counters_.evicted_pages += freed[0].size();
  return std::move(freed[0]);
}

Ids Tree::thin(Handle handle, std::uint32_t component, std::uint32_t tier, std::uint32_t limit) {
  require_tier(tier);
  require_component(component);
  const std::size_t s = slot(component, tier);
  const Index node = resolve(handle);
  Ids freed;
  for (;;) {
    std::uint32_t states = 0;
    std::uint32_t least = 0;
    bool forks = false;  // another sequence parts from this one between a state and the next one below
    Index victim = kNone;
    for (Index at = node; at != kNone && !nodes_[at].root(); at = nodes_[at].parent) {
      forks = forks || nodes_[at].children() > 1;
      if (cell(at, s).absent()) continue;
      ++states;
      const bool shared = std::exchange(forks, false) || nodes_[at].forked;
      if (at == node || shared || !cell(at, s).present() || cell(at, s).locks) continue;
      const std::uint32_t saved = saved_pages(at, s);
      if (victim != kNone && saved > least) continue;
      victim = at;
      least = saved;
    }
    if (states <= limit || victim == kNone) return freed;
    if (freed.empty()) freed.reserve(states);  // nothing below can fail, in later turns either
    take_cell(victim, s, &freed);
    ++counters_.evicted_pages;
    reap(victim);
  }
}

// Removed cells come first in their order, so this stops at the first other one.
std::vector<Ids> Tree::evict_removed(std::uint32_t tier) {
  require_tier(tier);
  std::vector<Ids> freed(rows_.size());
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const Queues candidates = queues(slot(c, tier));
    try {
      while (!candidates.empty(0) && nodes_[candidates.top()].removed)
        evict_one(candidates.top(), nodes_[candidates.top()].pages, c, tier, &freed);
    } catch (const std::bad_alloc&) {  // keep what was freed before; the next eviction takes the rest
    }
    counters_.evicted_pages += freed[c].size();
  }
  return freed;
}

bool Tree::waiting(std::uint32_t component, std::uint32_t tier, NodeStats* out) const {
  require_tier(tier);
  require_component(component);
  const Order& order = orders_[slot(component, tier)];
  if (order.empty() || order.rank(order.top()).major != kUnranked) return false;
  *out = stats(order.top());
  return true;
}

void Tree::rank(Handle handle, std::uint32_t component, std::uint32_t tier, Rank rank) {
  require_tier(tier);
  require_component(component);
  const Index node = resolve(handle);
  Order& order = orders_[slot(component, tier)];
  if (node == kNone || !order.contains(node))
    throw BadValue{"node", std::to_string(handle), "a candidate for eviction"};
  if (!(rank.major > kUnranked)) throw BadValue{"rank", std::to_string(rank.major), "a number above -infinity"};
  order.put(node, {rank}, nodes_[node].start);
}

}  // namespace mainstem
