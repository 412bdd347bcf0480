// The tree's structure: how nodes and cells are created, split, joined and removed. The operations are in match.cpp,
// insert.cpp, locks.cpp, evict.cpp and views.cpp.
#include "tree.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <functional>
#include <limits>
#include <utility>

namespace mainstem {

namespace {

// The most bytes of key in a joined node: limits what a join moves.
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
      has_standings_(!std::all_of(rows_.begin(), rows_.end(), std::mem_fn(&Component::leaf_only))),
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
  inflation_.resize(slots_);
  new_node();  // index 0 is no node
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

inline Rank Tree::rank_of(Index node, std::size_t slot) const {
  const Node& n = nodes_[node];
  if (n.removed || !row(slot).leaf_only()) [[unlikely]]
    return rank_by_standing(node, slot);
  return policy_.rank ? policy_.rank(n, n.accessed, protected_hits_) : Rank{kUnranked, 0};
}

// Policies that remember have functions of their own, so that the others do not pay for them.
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

// Makes room for `count` new nodes, so that creating them, linking them and filling their cells cannot fail.
void Tree::reserve_nodes(std::size_t count) {
  table_.reserve(count);
  if (count <= free_count_) return;
  const std::size_t needed = nodes_.size() + count;
  if (needed <= room_) return;
  const std::size_t room = with_spare(needed);
  nodes_.reserve(room);
  cells_.reserve(room * slots_);
  pins_.reserve(room * tiers_);
  if (has_standings_) standings_.reserve(room * slots_);
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
    if (has_standings_) standings_.resize(nodes_.size() * slots_);
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

// Records a word that distinguishes two children, so that a walk reads neither.
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
  n.removed = nodes_[parent].removed;
  if (remembers_) names_[node] = Identity::of(names_[parent], n.key.data(), n.pages, page_bytes_);
  table_.insert(hash(parent, n.key.data()), node);
  link(parent, node);
  return node;
}

// Splits `node` after its first `pages` pages and returns the new upper half. The numbers are the cases in
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

  u.removed = n.removed;
  if (n.detached) {
    n.detached = false;
    u.detached = true;
    u.parent = n.parent;
  } else {
    take_place(upper, node);
    table_.replace(from_parent, node, upper);
  }
  link(upper, node);
  table_.insert(hash(upper, n.key.data()), node);

  for (std::size_t s = 0; s < slots_; ++s) {
    Cell& lower = cell(node, s);
    Cell& half = cell(upper, s);
    half.holders = lower.absent() ? 0 : 1;
    if (row(s).divides()) {
      half.locks = lower.locks;        // 3
      half.transfer = lower.transfer;  // 4
      if (has_standings_) {            // 6
        const bool seen = row(s).first_needed(n.end(), page_size_) < u.end();
        standing(upper, s) = standing(node, s);
        if (!seen) standing(upper, s).worth = 0;
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

// Gives `node` the parent of `of`, and its place among the children; both begin with the same page.
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

// Whether joining an only child to its parent is unobservable: both hold the same cells, no lock or state ends between
// them, and neither is part of a window that counts.
bool Tree::joins(Index upper, Index lower) const {
  const Node& u = nodes_[upper];
  const Node& l = nodes_[lower];
  if (!ranks_itself() || u.root() || u.branches != Node::kChild || l.detached) return false;
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
    if (row(s).begins_late() && first.present() && (standing(upper, s).worth || standing(lower, s).worth)) return false;
    if (replacement(s) && first.present() && !replacement(s)->alike(upper, lower)) return false;
  }
  return true;
}

// Joins pieces of one insertion, or undoes a split: the parent becomes a part of `lower`, whose handles stay valid.
// Does nothing if the two differ in rank, or without memory.
void Tree::join(Index lower) noexcept {
  const Index upper = nodes_[lower].parent;
  if (!joins(upper, lower)) return;
  Node& l = nodes_[lower];
  Node& u = nodes_[upper];
  const std::uint64_t accessed =
      std::exchange(u.accessed, std::max<std::uint64_t>(u.accessed, l.accessed));  // see vacate()
  bool ranks_differ = !remembers_ && row(0).leaf_only() && rank_of(upper, 0) != rank_of(lower, 0);
  for (std::size_t s = 0; remembers_ && s < tiers_; ++s)
    if (cell(upper, s).present()) ranks_differ = ranks_differ || place_of(upper, s) != place_of(lower, s);
  u.accessed = accessed;
  if (ranks_differ) return;
  Run<std::uint8_t>::Room key_room;
  try {
    key_room = u.key.room_after(l.key.size(), kJoinedBytes);
    for (std::size_t s = 0; s < slots_; ++s)
      rooms_[s] = cell(upper, s).ids.room_after(cell(lower, s).ids.size(), kJoinedBytes / page_bytes_);
  } catch (const std::bad_alloc&) {
    return;
  }
  table_.erase(hash(upper, l.key.data()), lower);
  if (u.detached) {
    l.detached = true;
    l.parent = u.parent;
    l.next = l.previous = kNone;
  } else {
    table_.replace(hash(u.parent, u.key.data()), upper, lower);
    take_place(lower, upper);
  }
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
    if (has_standings_) standing(lower, s).used = std::max<std::uint64_t>(used(upper, s), used(lower, s));
    refresh(lower, s);
  }
  free_node(upper);
}

// Joins the node before the window that ends at a node, if that is possible now.
void Tree::join_after(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  while (!nodes_[node].root() && nodes_[node].start > first)
    node = nodes_[node].parent;
  if (nodes_[node].root()) return;
  node = nodes_[node].parent;
  if (!nodes_[node].root()) join(node);
}

// A lock that ended at this node is gone: joins the node to its only child, if it has one.
void Tree::release_boundary(Index node) {
  if (nodes_[node].branches == Node::kChild) join(nodes_[node].first_child);
}

bool Tree::dead(Index node) const {
  if (nodes_[node].branches) return false;
  for (std::uint32_t tier = 0; tier < tiers_; ++tier)
    if (pins(node, tier)) return false;
  return empty(node);
}

bool Tree::empty_of(Index node, std::size_t component) const {
  for (std::uint32_t tier = 0; tier < tiers_; ++tier)
    if (!cell(node, component * tiers_ + tier).absent()) return false;
  return true;
}

bool Tree::empty(Index node) const {
  for (std::size_t s = 0; s < slots_; ++s)
    if (!cell(node, s).absent()) return false;
  return true;
}

// Unpins the parent of a detached node that is being freed.
[[gnu::noinline]] void Tree::unpin_parent(Index node) {
  const Index parent = nodes_[node].parent;
  --pins(parent, 0);
  if (--above_removed_[parent] == 0) above_removed_.erase(parent);
}

// Frees a node that holds nothing, and every ancestor that is then empty, too; a root goes with its last child.
void Tree::reap(Index node) {
  bool unpinned = false;
  while (node != kNone && dead(node)) {
    const Index parent = nodes_[node].parent;
    if (nodes_[node].detached) [[unlikely]] {
      unpin_parent(node);
      unpinned = true;
    } else if (parent == kNone) {
      const Run<std::uint8_t>& name = nodes_[node].key;
      table_.erase(hash({reinterpret_cast<const char*>(name.data()), name.size()}), node);
      --roots_;
    } else {
      table_.erase(hash(parent, nodes_[node].key.data()), node);
      unlink(node);
    }
    const std::uint64_t accessed = nodes_[node].accessed;
    free_node(node);
    node = parent;
    if (node != kNone && nodes_[node].accessed < accessed)
      touch(node, accessed);  // see vacate(): this node may have held nothing
  }
  if (unpinned && node != kNone) release_boundary(node);
}

// ---------------------------------------------------------------- removal
//
// A removed node may be in use: it keeps its contents and its parent, but the parent and the child table do not refer
// to it any more. So the parent may get another child that begins with the same page. The first removed node of a path
// is called detached; it pins its parent, which therefore outlives it.

// Allocates what detach() needs, so that it cannot fail.
void Tree::prepare_to_detach(Index node) {
  above_removed_.try_emplace(nodes_[node].parent, 0);
}

std::uint64_t Tree::detach(Index node) noexcept {
  const Index parent = nodes_[node].parent;
  ++pins(parent, 0);
  ++above_removed_[parent];
  table_.erase(hash(parent, nodes_[node].key.data()), node);
  unlink(node);
  nodes_[node].next = nodes_[node].previous = kNone;
  nodes_[node].detached = true;
  std::uint64_t pages = 0;
  every_from(node, [&](Index at) {
    nodes_[at].removed = true;
    pages += nodes_[at].pages;
    for (std::size_t s = 0; s < slots_; ++s)
      refresh(at, s);
    return true;
  });
  return pages;
}

// Returns the children whose first page begins with a tail shorter than a page.
std::vector<Index> Tree::children_like(Index parent, Bytes tail) const {
  std::vector<Index> found;
  for (Index at = nodes_[parent].first_child; at != kNone; at = nodes_[at].next)
    if (std::equal(tail.begin(), tail.end(), nodes_[at].key.data())) found.push_back(at);
  return found;
}

std::uint64_t Tree::remove(std::string_view ns, Bytes key) {
  const std::uint32_t pages = whole_pages(key);
  const Bytes tail = key.subspan(std::size_t{pages} * page_bytes_);
  const std::uint32_t kept = tail.empty() && pages ? pages - 1 : pages;  // before the page that the key ends in
  const Index root = find_root(ns);
  std::vector<Step> path;
  walk(root, key, pages, &path, {});
  if (root == kNone || (path.empty() ? 0 : nodes_[path.back().node].start + path.back().pages) < pages) return 0;
  const Bytes first = key.subspan(std::size_t{kept} * page_bytes_);  // the first page to remove, or its beginning
  while (!path.empty() && nodes_[path.back().node].start >= kept)
    path.pop_back();
  const Index above = path.empty() ? root : path.back().node;
  std::vector<Index> going;
  if (kept < nodes_[above].end()) {
    const std::uint32_t inside = kept - nodes_[above].start;
    if (!std::equal(first.begin(), first.end(), nodes_[above].key.data() + std::size_t{inside} * page_bytes_)) return 0;
    split(above, inside);
    going.push_back(above);
  } else {
    going = children_like(above, first);
  }
  for (const Index node : going)
    prepare_to_detach(node);
  std::uint64_t removed = 0;  // nothing below can fail
  for (const Index node : going)
    removed += detach(node);
  return removed;
}

bool Tree::removed(Handle node) const {
  return nodes_[resolve(node)].removed;
}

// ---------------------------------------------------------------- cells

bool Tree::candidate(Index node, std::size_t slot) const {
  const Cell& c = cell(node, slot);
  return c.present() && c.locks == 0 && !(row(slot).leaf_only() && c.holders > 0);
}

std::uint64_t Tree::used(Index node, std::size_t slot) const {
  return row(slot).leaf_only() ? nodes_[node].accessed : standing(node, slot).used;
}

[[gnu::noinline]] Rank Tree::rank_by_standing(Index node, std::size_t slot) const {
  const std::uint64_t used = this->used(node, slot);
  if (goes_first(node, slot)) return {std::numeric_limits<double>::lowest(), number(used)};
  if (row(slot).weighs) return {standing(node, slot).worth, number(used)};
  return policy_.rank ? policy_.rank(nodes_[node], used, protected_hits_) : Rank{kUnranked, 0};
}

Place Tree::place_of(Index node, std::size_t slot) const {
  const Replacement* const at = replacement(slot);
  return at && !goes_first(node, slot) ? at->place(node) : Place{rank_of(node, slot)};
}

// Pages that need no recomputation because of the state here: those after the previous state.
std::uint32_t Tree::saved_pages(Index node, std::size_t slot) const {
  Index above = nodes_[node].parent;
  while (!nodes_[above].root() && cell(above, slot).absent())
    above = nodes_[above].parent;
  return nodes_[node].end() - nodes_[above].end();
}

// A state was created or used. GreedyDual (Young 1994; Cao and Irani 1997): its worth is what it saves, plus the worth
// of the last evicted state, so that unused states age. All states have one size and their savings grow with the pages,
// so pages stand for floating-point operations saved per byte.
void Tree::credit(Index node, std::size_t slot) {
  Standing& at = standing(node, slot);
  at.used = tick_;
  if (!row(slot).per_page()) at.worth = row(slot).weighs ? inflation_[slot] + saved_pages(node, slot) : kInserted;
}

// A sequence has grown past a state. Its next turn starts from the new state; the old one serves only sequences that
// part in between. It is evicted first, unless a sequence parts there or did.
void Tree::supersede_above(Index node, std::size_t slot) {
  Index above = nodes_[node].parent;
  for (; !nodes_[above].root() && nodes_[above].children() == 1; above = nodes_[above].parent)
    if (!cell(above, slot).absent()) break;
  if (nodes_[above].root() || nodes_[above].children() > 1 || nodes_[above].forked) return;
  standing(above, slot).worth = 0;
  refresh(above, slot);
}

// Whether a cell is evicted before all others of its kind, whatever the policy: removed nodes, superseded states, and
// window pages before the windows of all prefixes that have ended so far. A window page is worth 1 in the window of an
// inserted prefix, until that grows; 2 in the window of a matched prefix; else 0. A window that ends with a node may
// begin inside it: then the pages before the window are evicted first, and evict_one() splits there.
bool Tree::goes_first(Index node, std::size_t slot) const {
  if (nodes_[node].removed) return true;
  if (row(slot).leaf_only()) return false;
  if (standing(node, slot).worth == 0) return true;
  return row(slot).per_page() && nodes_[node].start < row(slot).first_needed(nodes_[node].end(), page_size_);
}

// A prefix ends at a node: it uses the window and the state there, and no earlier ones.
void Tree::note_end(Index node, std::size_t slot, double worth) {
  if (node == kNone || row(slot).leaf_only()) return;
  end_window(node, slot, worth);
  if (row(slot).per_page() || cell(node, slot).absent()) return;
  credit(node, slot);
  refresh(node, slot);
}

void Tree::end_window(Index node, std::size_t slot, double least) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    Standing& at = standing(node, slot);
    at.worth = std::max(at.worth, least);
    at.used = tick_;
    refresh(node, slot);
  }
}

void Tree::pass_window(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    if (standing(node, slot).worth != kInserted) continue;
    standing(node, slot).worth = 0;
    refresh(node, slot);
  }
}

void Tree::refresh_use(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  if (node == kNone) return;
  ++tick_;
  if (single_cell_ && !remembers_)
    nodes_[node].accessed = tick_;  // a locked node is in no order
  else if (!remembers_)
    touch(node, tick_);
  for (std::uint32_t c = 0; has_standings_ && c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (row(s).leaf_only()) continue;
    end_window(node, s, 0);
    if (row(s).per_page() || cell(node, s).absent()) continue;
    standing(node, s).used = tick_;
    refresh(node, s);
  }
}

void Tree::keep_window(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  for (std::uint32_t c = 0; node != kNone && c < rows_.size(); ++c)
    end_window(node, slot(c, tier), kMatched);
}

// Called whenever a node or its cell has changed. Drops an external rank; the policy is asked for a new one.
void Tree::refresh(Index node, std::size_t slot) {
  if (candidate(node, slot))
    put(node, slot);
  else
    remove(node, slot);
}

// A window or a state was inserted here.
[[gnu::noinline]] void Tree::note_standing(Index node, std::size_t slot) {
  standing(node, slot).worth = 0;
  credit(node, slot);
  if (!row(slot).per_page()) supersede_above(node, slot);
}

// Puts ids into an absent cell. With `transfer` the cell is in flight, in the transfer that this node names.
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
  if (!row(slot).leaf_only()) [[unlikely]]
    note_standing(node, slot);
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
  if (!row(slot).per_page()) nodes_[node].forked = nodes_[node].forked && !empty_of(node, slot / tiers_);
  const Index parent = nodes_[node].parent;
  --cell(parent, slot).holders;
  refresh(node, slot);
  refresh(parent, slot);
  // Using a child uses its parent. An insertion after a node does not mark all nodes above: that would cost O(depth),
  // and it matters only now that the parent may be evicted next.
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
