// The tree's structure: nodes and cells, how they are made, cut, joined and removed. Its operations are in match.cpp,
// insert.cpp, locks.cpp, evict.cpp and views.cpp.
#include "tree.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <limits>
#include <utility>

namespace mainstem {

namespace {

// A joined node holds at most so many bytes of key, so that a joint moves no more than that.
constexpr std::size_t kJoinedBytes = 16384;

const Policy& find_policy(std::string_view name) {
  for (const Policy& policy : kPolicies)
    if (policy.name == name) return policy;
  std::string names;
  for (const Policy& policy : kPolicies)
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  throw BadValue{"policy", std::string(name), "one of " + names};
}

}  // namespace

Tree::Tree(std::uint32_t symbol_bytes, std::uint32_t page_size, std::vector<Component> components, std::uint32_t tiers,
           std::string_view policy, std::uint64_t hash_seed, double symbol_tokens, std::uint32_t protected_hits)
    : symbol_bytes_(symbol_bytes),
      page_size_(page_size),
      page_bytes_(symbol_bytes * page_size),
      tiers_(tiers),
      rows_(std::move(components)),
      slots_(rows_.size() * tiers),
      single_cell_(slots_ == 1 && rows_[0].leaf_only()),
      has_worths_(std::any_of(rows_.begin(), rows_.end(), [](const Component& row) { return row.has_worth(); })),
      policy_(find_policy(policy)),
      protected_hits_(protected_hits),
      remembers_(policy_.make && !rows_.empty() && rows_[0].per_page()),
      seed_(hash_seed) {
  require(symbol_bytes == 4 || symbol_bytes == 8 || symbol_bytes == 16, "symbol_bytes", symbol_bytes, "4, 8 or 16");
  require(page_size >= 1 && page_size <= (1u << 20), "page_size", page_size, "1 to 1048576");
  require(tiers >= 1 && tiers <= kMaxTiers, "tiers", tiers, "1 to 4");
  require(!rows_.empty() && rows_.size() <= kMaxComponents, "components", rows_.size(), "1 to 8 of them");
  for (std::size_t s = 0; s < slots_; ++s)
    row_of_slot_.push_back(rows_[s / tiers_]);
  replacements_.resize(slots_);
  const bool has_states = std::any_of(rows_.begin(), rows_.end(), [](const Component& row) { return !row.divides(); });
  const Surroundings around{nodes_, names_, tick_, page_bytes_, symbol_tokens * page_size_, has_states};
  for (std::uint32_t tier = 0; remembers_ && tier < tiers_; ++tier)
    replacements_[slot(0, tier)] = policy_.make(around);
  if (remembers_) queue_count_ = replacements_[0]->queues();
  orders_.resize(queue_count_ * slots_);
  counts_.resize(slots_);
  rooms_.resize(slots_);
  worn_.resize(slots_);
  new_node();  // index 0 is nobody
}

// ---------------------------------------------------------------- addresses

Handle Tree::handle(Index node) const {
  return nodes_[node].root() ? 0 : Handle{nodes_[node].generation} << 32 | Handle{node};
}

Index Tree::resolve(Handle handle) const {
  if (handle == 0) return kNone;
  const auto node = static_cast<std::uint64_t>(handle) & 0xffffffffu;
  const auto generation = static_cast<std::uint64_t>(handle) >> 32;
  if (handle < 0 || node == kNone || node >= nodes_.size() || !nodes_[node].live ||
      nodes_[node].generation != generation)
    throw StaleHandle{handle};
  return static_cast<Index>(node);
}

std::uint32_t Tree::hash(Index parent, const std::uint8_t* page) const {
  return page_hash(seed_, parent, page, page_bytes_);
}

std::uint32_t Tree::hash(std::string_view ns) const {
  return page_hash(seed_, kNone, reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
}

// A root's key is the name of its namespace.
Index Tree::find_root(std::string_view ns) const {
  return table_.find(hash(ns), [&](Index node) {
    const Run<std::uint8_t>& name = nodes_[node].key;
    return nodes_[node].root() && name.size() == ns.size() && std::equal(ns.begin(), ns.end(), name.data());
  });
}

void Tree::require_tier(std::uint32_t tier) const {
  if (tier >= tiers_) throw BadValue{"tier", std::to_string(tier), "below " + std::to_string(tiers_)};
}

void Tree::require_component(std::uint32_t component) const {
  if (component >= rows_.size())
    throw BadValue{"component", std::to_string(component), "below " + std::to_string(rows_.size())};
}

std::uint32_t Tree::whole_pages(Bytes key) const {
  require(key.size() % symbol_bytes_ == 0, "key length in bytes", key.size(), "a multiple of the symbol's bytes");
  require(key.size() <= std::numeric_limits<std::uint32_t>::max(), "key length in bytes", key.size(), "below 4 GiB");
  return static_cast<std::uint32_t>(key.size() / page_bytes_);
}

bool Tree::divides_pages() const {
  return rows_.size() == 1 && rows_[0].leaf_only();
}

// ---------------------------------------------------------------- orders

// Policies that remember have functions of their own: the others must not pay for them.
inline void Tree::put(Index node, std::size_t slot) {
  if (remembers_) [[unlikely]]
    put_in_queue(node, slot);
  else
    orders_[slot].put(node, rank_of(node, slot), nodes_[node].start);
}

inline void Tree::remove(Index node, std::size_t slot) {
  if (remembers_) [[unlikely]]
    remove_from_queue(node, slot);
  else if (orders_[slot].contains(node))
    orders_[slot].remove(node);
}

[[gnu::noinline]] void Tree::put_in_queue(Index node, std::size_t slot) {
  queues(slot).put(node, place_of(node, slot), nodes_[node].start);
  if (replacement(slot)) replacement(slot)->offered(node);
}

[[gnu::noinline]] void Tree::remove_from_queue(Index node, std::size_t slot) {
  if (!queues(slot).contains(node)) return;
  queues(slot).remove(node);
  if (replacement(slot)) replacement(slot)->withdrawn(node);
}

[[gnu::noinline]] void Tree::note_came(Index node, std::size_t slot) {
  if (replacement(slot)) replacement(slot)->came(node);
}

[[gnu::noinline]] void Tree::note_gone(Index node, std::uint32_t pages, std::size_t slot) {
  if (replacement(slot)) replacement(slot)->gone(node, pages);
}

// ---------------------------------------------------------------- structure

// Room for so many new nodes, after which making them, linking them and giving them cells cannot fail.
void Tree::reserve_nodes(std::size_t count) {
  table_.reserve(count);
  if (count <= free_count_) return;
  const std::size_t needed = nodes_.size() + count;
  if (needed <= room_) return;
  const std::size_t room = with_spare(needed);
  nodes_.reserve(room);
  cells_.reserve(room * slots_);
  pins_.reserve(room * tiers_);
  if (has_worths_) worths_.reserve(room * slots_);
  for (Order& order : orders_)
    order.reserve(room);
  if (remembers_) names_.reserve(room);
  for (const auto& replacement : replacements_)
    if (replacement) replacement->reserve(room);
  room_ = room;
}

Index Tree::new_node() {
  reserve_nodes(1);
  Index node = free_;
  if (node == kNone) {
    node = static_cast<Index>(nodes_.size());
    nodes_.resize(nodes_.size() + 1);
    nodes_.back().generation = 1;
    cells_.resize(nodes_.size() * slots_);
    pins_.resize(nodes_.size() * tiers_);
    if (has_worths_) worths_.resize(nodes_.size() * slots_);
    if (remembers_) names_.resize(nodes_.size());
  } else {
    free_ = std::exchange(nodes_[node].next, kNone);
    --free_count_;
  }
  nodes_[node].live = true;
  return node;
}

void Tree::free_node(Index node) {
  nodes_[node].outdate();
  Node fresh;
  fresh.generation = nodes_[node].generation;
  fresh.next = std::exchange(free_, node);
  nodes_[node] = std::move(fresh);
  for (std::size_t s = 0; s < slots_; ++s)
    cell(node, s) = Cell{};
  ++free_count_;
}

Index Tree::make_root(std::string_view ns) {
  if (const Index root = find_root(ns)) return root;
  Run<std::uint8_t> name(reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
  const Index root = new_node();  // nothing below can fail
  nodes_[root].key = std::move(name);
  if (remembers_) names_[root] = root_name(ns);
  table_.insert(hash(ns), root);
  ++roots_;
  return root;
}

void Tree::link(Index parent, Index node) {
  Node& n = nodes_[node];
  Node& p = nodes_[parent];
  n.parent = parent;
  n.next = kNone;
  n.previous = p.last_child;
  (p.last_child == kNone ? p.first_child : nodes_[p.last_child].next) = node;
  p.last_child = node;
  p.branches = (p.children() + 1) * Node::kChild;
  if (p.children() == 2) note_fork(parent);
}

void Tree::unlink(Index node) {
  Node& n = nodes_[node];
  Node& p = nodes_[n.parent];
  (n.previous == kNone ? p.first_child : nodes_[n.previous].next) = n.next;
  (n.next == kNone ? p.last_child : nodes_[n.next].previous) = n.previous;
  p.branches = (p.children() - 1) * Node::kChild;
  if (p.children() == 2) note_fork(n.parent);
}

// Two children are told apart by one word, without a look at either.
void Tree::note_fork(Index parent) {
  Node& p = nodes_[parent];
  const std::uint8_t* one = nodes_[p.first_child].key.data();
  const std::uint8_t* two = nodes_[p.last_child].key.data();
  const auto at = std::mismatch(one, one + page_bytes_, two).first - one;
  p.branches = (static_cast<std::uint32_t>(at) & ~3u) | Node::kFork;
  p.fork_word = static_cast<std::uint32_t>(load_word(one + p.fork_at(), 4));
}

Index Tree::add_child(Index parent, Run<std::uint8_t>&& key, std::int32_t priority) {
  const Index node = new_node();
  Node& n = nodes_[node];
  n.pages = static_cast<std::uint32_t>(key.size() / page_bytes_);
  n.start = nodes_[parent].end();
  n.key = std::move(key);
  n.priority = priority;
  n.created = n.accessed = tick_;
  if (remembers_) names_[node] = Identity::of(names_[parent], n.key.data(), n.pages, page_bytes_);
  table_.insert(hash(parent, n.key.data()), node);
  link(parent, node);
  return node;
}

// Cuts `node` behind its first `pages` pages and gives the new upper half back. The numbers are the cases of
// docs/design.md, "The cases of a split".
Index Tree::split(Index node, std::uint32_t pages) {
  assert(pages > 0 && pages < nodes_[node].pages);
  const std::size_t key_bytes = std::size_t{pages} * page_bytes_;
  Run<std::uint8_t>::Room key_room = nodes_[node].key.room(key_bytes);
  for (std::size_t s = 0; s < slots_; ++s)
    if (row(s).divides() && !cell(node, s).absent()) rooms_[s] = cell(node, s).ids.room(pages);
  const Index upper = new_node();  // nothing below can fail

  Node& n = nodes_[node];
  Node& u = nodes_[upper];
  const std::uint32_t from_parent = hash(n.parent, n.key.data());
  u.key = n.key.take_front(key_bytes, std::move(key_room));
  u.start = n.start;
  u.pages = pages;
  n.start += pages;
  n.pages -= pages;
  u.created = n.created;  // 5
  u.accessed = n.accessed;
  u.hits = n.hits;
  u.priority = n.priority;

  if (remembers_) names_[upper] = Identity::above(names_[node], n.key.data(), n.pages, page_bytes_);

  take_place(upper, node);
  table_.replace(from_parent, node, upper);
  link(upper, node);
  table_.insert(hash(upper, n.key.data()), node);

  for (std::size_t s = 0; s < slots_; ++s) {
    Cell& lower = cell(node, s);
    Cell& half = cell(upper, s);
    half.holders = lower.absent() ? 0 : 1;
    if (row(s).divides()) {
      half.locks = lower.locks;        // 3
      half.transfer = lower.transfer;  // 4
      if (has_worths_) {               // 6
        const bool seen = row(s).first_needed(n.end(), page_size_) < u.end();
        worth(upper, s) = seen ? worth(node, s) : 0;
      }
      if (!lower.absent()) half.ids = lower.ids.take_front(pages, std::move(rooms_[s]));  // 1
      if (lower.present() && replacement(s)) replacement(s)->split(upper, node);          // 5
    } else if (!lower.absent()) {                                                         // 2
      --cell(u.parent, s).holders;
    }
    refresh(upper, s);
    refresh(node, s);
  }
  ++counters_.splits;
  return upper;
}

// Gives `node`, which begins with the same page, the parent and the place among its children that `of` has.
void Tree::take_place(Index node, Index of) {
  Node& n = nodes_[node];
  const Node& o = nodes_[of];
  n.parent = o.parent;
  n.next = o.next;
  n.previous = o.previous;
  Node& p = nodes_[n.parent];
  (n.previous == kNone ? p.first_child : nodes_[n.previous].next) = node;
  (n.next == kNone ? p.last_child : nodes_[n.next].previous) = node;
}

// Whether nobody can tell if an only child is joined to its parent: both hold the same cells, no lock ends between
// them, no state stands there, and of windows both lie behind all ends.
bool Tree::joins(Index upper, Index lower) const {
  const Node& u = nodes_[upper];
  const Node& l = nodes_[lower];
  if (!ranks_itself() || u.root() || u.branches != Node::kChild) return false;
  if (u.hits != l.hits || u.priority != l.priority || u.key.size() + l.key.size() > kJoinedBytes) return false;
  for (std::uint32_t tier = 0; tier < tiers_; ++tier)
    if (pins(upper, tier)) return false;
  for (std::size_t s = 0; s < slots_; ++s) {
    const Cell& first = cell(upper, s);
    const Cell& second = cell(lower, s);
    if (!row(s).divides()) {
      if (!first.absent()) return false;
      continue;
    }
    if (first.in_flight() || first.transfer != second.transfer || first.locks != second.locks) return false;
    if (row(s).begins_late() && first.present() && !(behind(upper, s) && behind(lower, s))) return false;
    if (replacement(s) && first.present() && !replacement(s)->alike(upper, lower)) return false;
  }
  return true;
}

// Makes one node of what came in pieces, or undoes a split: the parent becomes a part of `lower`, whose handles stay.
// Not where eviction would come to the parent later than to the child; and not without memory.
void Tree::join(Index lower) noexcept {
  const Index upper = nodes_[lower].parent;
  if (!joins(upper, lower)) return;
  Node& l = nodes_[lower];
  Node& u = nodes_[upper];
  const std::uint64_t accessed =
      std::exchange(u.accessed, std::max<std::uint64_t>(u.accessed, l.accessed));  // see vacate()
  bool told = !remembers_ && rank_of(upper, 0) != rank_of(lower, 0);
  for (std::size_t s = 0; remembers_ && s < tiers_; ++s)
    if (cell(upper, s).present()) told = told || place_of(upper, s) != place_of(lower, s);
  u.accessed = accessed;
  if (told) return;
  Run<std::uint8_t>::Room key_room;
  try {
    key_room = u.key.room_behind(l.key.size(), kJoinedBytes);
    for (std::size_t s = 0; s < slots_; ++s)
      rooms_[s] = cell(upper, s).ids.room_behind(cell(lower, s).ids.size(), kJoinedBytes / page_bytes_);
  } catch (const std::bad_alloc&) {
    return;
  }
  table_.erase(hash(upper, l.key.data()), lower);
  table_.replace(hash(u.parent, u.key.data()), upper, lower);
  take_place(lower, upper);
  l.accessed = std::max<std::uint64_t>(u.accessed, l.accessed);
  u.key.append(l.key, std::move(key_room));
  l.key = std::move(u.key);
  l.start = u.start;
  l.pages += u.pages;
  for (std::size_t s = 0; s < slots_; ++s) {
    Cell& half = cell(upper, s);
    remove(upper, s);
    if (!row(s).divides()) {  // the state at the end stays
      if (!cell(lower, s).absent()) ++cell(l.parent, s).holders;
      refresh(lower, s);
      continue;
    }
    if (half.present() && replacement(s)) replacement(s)->joined(upper, lower);
    half.ids.append(cell(lower, s).ids, std::move(rooms_[s]));
    cell(lower, s).ids = std::move(half.ids);
    refresh(lower, s);
  }
  free_node(upper);
}

// What has come to lie behind the window that ends at a node may be joined.
void Tree::join_behind(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  while (!nodes_[node].root() && nodes_[node].start > first)
    node = nodes_[node].parent;
  if (nodes_[node].root()) return;
  node = nodes_[node].parent;
  if (!nodes_[node].root()) join(node);
}

// A lock that ended at this node is gone: the node may be joined to what follows.
void Tree::release_border(Index node) {
  if (nodes_[node].branches == Node::kChild) join(nodes_[node].first_child);
}

bool Tree::dead(Index node) const {
  if (nodes_[node].branches) return false;
  for (std::uint32_t tier = 0; tier < tiers_; ++tier)
    if (pins(node, tier)) return false;
  for (std::size_t s = 0; s < slots_; ++s)
    if (!cell(node, s).absent()) return false;
  return true;
}

// Removes a node that holds nothing, and every ancestor left like it; a root goes when its last child went.
void Tree::reap(Index node) {
  while (node != kNone && dead(node)) {
    const Index parent = nodes_[node].parent;
    if (parent == kNone) {
      const Run<std::uint8_t>& name = nodes_[node].key;
      table_.erase(hash({reinterpret_cast<const char*>(name.data()), name.size()}), node);
      --roots_;
    } else {
      table_.erase(hash(parent, nodes_[node].key.data()), node);
      unlink(node);
    }
    free_node(node);
    node = parent;
  }
}

// ---------------------------------------------------------------- cells

bool Tree::candidate(Index node, std::size_t slot) const {
  const Cell& c = cell(node, slot);
  return c.present() && c.locks == 0 && !(row(slot).leaf_only() && c.holders > 0);
}

Rank Tree::rank_of(Index node, std::size_t slot) const {
  if (row(slot).weighs) return {worth(node, slot), number(nodes_[node].accessed)};
  if (behind(node, slot)) return {std::numeric_limits<double>::lowest(), number(nodes_[node].accessed)};
  return policy_.rank ? policy_.rank(nodes_[node], protected_hits_) : Rank{kUnranked, 0};
}

Place Tree::place_of(Index node, std::size_t slot) const {
  const Replacement* const at = replacement(slot);
  return at && !behind(node, slot) ? at->place(node) : Place{rank_of(node, slot)};
}

// Pages that need not be computed again because a state stands here: those behind the one above.
std::uint32_t Tree::saved_pages(Index node, std::size_t slot) const {
  Index above = nodes_[node].parent;
  while (!nodes_[above].root() && cell(above, slot).absent())
    above = nodes_[above].parent;
  return nodes_[node].end() - nodes_[above].end();
}

// A state was made or used. GreedyDual (Young 1994; Cao and Irani 1997): its worth is what it saves, on top of the
// worth of the last one that was evicted, so that what is not used ages. States are of one size and what they save
// grows with the pages, so pages stand for floating-point operations saved a byte.
void Tree::credit(Index node, std::size_t slot) {
  if (row(slot).weighs) worth(node, slot) = worn_[slot] + saved_pages(node, slot);
}

// What a cell of a window is worth: nothing behind the windows of all prefixes that ended so far (it is evicted before
// all others, whatever the policy); one in the window of a prefix that was put here, until that grows; two in the
// window of one that was found here.
bool Tree::behind(Index node, std::size_t slot) const {
  return row(slot).begins_late() && worth(node, slot) == 0;
}

void Tree::end_window(Index node, std::size_t slot, double least) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    if (worth(node, slot) >= least) continue;
    worth(node, slot) = least;
    refresh(node, slot);
  }
}

void Tree::pass_window(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    if (worth(node, slot) != kPutHere) continue;
    worth(node, slot) = 0;
    refresh(node, slot);
  }
}

void Tree::keep_window(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  for (std::uint32_t c = 0; node != kNone && c < rows_.size(); ++c)
    end_window(node, slot(c, tier), kFoundHere);
}

// Called whenever a node or its cell has changed. A rank from outside is dropped, to be asked for anew.
void Tree::refresh(Index node, std::size_t slot) {
  if (candidate(node, slot))
    put(node, slot);
  else
    remove(node, slot);
}

// Puts ids into an absent cell. With `transfer` the cell is in flight, under that node's name.
void Tree::occupy(Index node, std::size_t slot, Run<std::int32_t>&& ids, Index transfer) {
  Cell& c = cell(node, slot);
  assert(c.absent());
  c.ids = std::move(ids);
  c.transfer = transfer == kNone ? kHere : transfer;
  const std::uint64_t n = c.ids.size();
  if (c.in_flight()) {
    counts_[slot].in_flight += n;
  } else {
    counts_[slot].present += n;
    if (c.locks) counts_[slot].locked += n;
    if (remembers_) [[unlikely]]
      note_came(node, slot);
  }
  const Index parent = nodes_[node].parent;
  ++cell(parent, slot).holders;
  if (row(slot).begins_late()) worth(node, slot) = 0;
  credit(node, slot);
  refresh(node, slot);
  refresh(parent, slot);
}

Run<std::int32_t> Tree::vacate(Index node, std::size_t slot) {
  Cell& c = cell(node, slot);
  assert(!c.absent());
  const std::uint64_t n = c.ids.size();
  if (c.in_flight()) {
    counts_[slot].in_flight -= n;
  } else {
    counts_[slot].present -= n;
    assert(c.locks == 0);
    if (remembers_) [[unlikely]]
      note_gone(node, nodes_[node].pages, slot);
  }
  c.transfer = kNone;
  const Index parent = nodes_[node].parent;
  --cell(parent, slot).holders;
  refresh(node, slot);
  refresh(parent, slot);
  // Whoever used the child used its parent. An insertion behind a node does not say so to all nodes above: that would
  // cost the depth, and matters only now that the parent may be the next to go.
  if (row(slot).leaf_only() && nodes_[parent].accessed < nodes_[node].accessed) touch(parent, nodes_[node].accessed);
  return std::move(c.ids);
}

void Tree::settle(Index node, std::size_t slot) {
  Cell& c = cell(node, slot);
  const std::uint64_t n = c.ids.size();
  counts_[slot].in_flight -= n;
  counts_[slot].present += n;
  if (c.locks) counts_[slot].locked += n;
  c.transfer = kHere;
  if (remembers_) note_came(node, slot);
  refresh(node, slot);
}

void Tree::touch(Index node, std::uint64_t tick) {
  nodes_[node].accessed = tick;
  for (std::size_t s = 0; s < slots_; ++s)
    if (candidate(node, s)) put(node, s);
}

}  // namespace mainstem
