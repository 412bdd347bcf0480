#include "tree.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <limits>
#include <tuple>

namespace mainstem {

namespace {

constexpr std::uint32_t kPartialSiblings = 32;  // how many children a partial match looks at, youngest first
constexpr double kUnranked = -std::numeric_limits<double>::infinity();

const Policy* find_policy(std::string_view name) {
  for (const Policy& policy : kPolicies)
    if (policy.name == name) return &policy;
  std::string names;
  for (const Policy& policy : kPolicies)
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  throw BadValue{"policy", std::string(name), "one of " + names};
}

void require(bool good, const char* name, std::uint64_t value, const char* allowed) {
  if (!good) throw BadValue{name, std::to_string(value), allowed};
}

// Where a component's ids begin: the first page from `start` on that has one.
std::uint32_t first_id(IdSpan ids, std::uint32_t start) {
  const auto found = std::find_if(ids.begin() + start, ids.end(), [](std::int32_t id) { return id >= 0; });
  return static_cast<std::uint32_t>(found - ids.begin());
}

// Length of the common prefix of two byte strings: one memcmp when they agree, otherwise halving.
std::size_t common_bytes(const std::uint8_t* a, const std::uint8_t* b, std::size_t n) {
  if (std::memcmp(a, b, n) == 0) return n;
  std::size_t at = 0;
  std::size_t step = 64;
  while (at + step < n && std::memcmp(a + at, b + at, step) == 0) {
    at += step;
    step *= 2;
  }
  n = std::min(n, at + step);
  while (n - at > 16) {
    const std::size_t half = (n - at) / 2;
    if (std::memcmp(a + at, b + at, half) == 0)
      at += half;
    else
      n = at + half;
  }
  while (a[at] == b[at])
    ++at;
  return at;
}

}  // namespace

Tree::Tree(std::uint32_t symbol_bytes, std::uint32_t page_size, std::vector<Component> components, std::uint32_t tiers,
           std::string_view policy, std::uint64_t hash_seed)
    : symbol_bytes_(symbol_bytes),
      page_size_(page_size),
      page_bytes_(symbol_bytes * page_size),
      tiers_(tiers),
      rows_(std::move(components)),
      slots_(rows_.size() * tiers),
      policy_(find_policy(policy)),
      seed_(hash_seed) {
  require(symbol_bytes == 4 || symbol_bytes == 8 || symbol_bytes == 16, "symbol_bytes", symbol_bytes, "4, 8 or 16");
  require(page_size >= 1 && page_size <= (1u << 20), "page_size", page_size, "1 to 1048576");
  require(tiers >= 1 && tiers <= kMaxTiers, "tiers", tiers, "1 to 4");
  require(!rows_.empty() && rows_.size() <= kMaxComponents, "components", rows_.size(), "1 to 8 of them");
  orders_.resize(slots_);
  counts_.resize(slots_);
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

Index Tree::find_root(std::string_view ns) const {
  const auto found = roots_.find(ns);
  return found == roots_.end() ? kNone : found->second;
}

std::uint32_t Tree::hash(Index parent, const std::uint8_t* page) const {
  return page_hash(seed_, parent, page, page_bytes_);
}

Index Tree::child(Index parent, const std::uint8_t* page) const {
  return table_.find(hash(parent, page), [&](Index node) {
    return nodes_[node].parent == parent && std::memcmp(nodes_[node].key.data(), page, page_bytes_) == 0;
  });
}

std::uint32_t Tree::common_pages(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t pages) const {
  return static_cast<std::uint32_t>(common_bytes(a, b, std::size_t{pages} * page_bytes_) / page_bytes_);
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

// ---------------------------------------------------------------- structure

// Room for so many new nodes, after which making them, linking them and giving them cells cannot fail.
void Tree::reserve_nodes(std::size_t count) {
  table_.reserve(count);
  if (count <= free_.size()) return;
  const std::size_t needed = nodes_.size() + count;
  if (needed <= room_) return;
  const std::size_t room = needed + needed / 2;
  nodes_.reserve(room);
  cells_.reserve(room * slots_);
  pins_.reserve(room * tiers_);
  free_.reserve(room);
  for (Order& order : orders_)
    order.reserve(room);
  room_ = room;
}

Index Tree::new_node() {
  reserve_nodes(1);
  if (free_.empty()) {
    nodes_.emplace_back();
    nodes_.back().generation = 1;
    cells_.resize(nodes_.size() * slots_);
    pins_.resize(nodes_.size() * tiers_);
    free_.push_back(static_cast<Index>(nodes_.size() - 1));
  }
  const Index node = free_.back();
  free_.pop_back();
  nodes_[node].live = true;
  return node;
}

void Tree::free_node(Index node) {
  const std::uint32_t generation = (nodes_[node].generation + 1) & 0x7fffffff;
  nodes_[node] = Node{};
  nodes_[node].generation = generation ? generation : 1;
  for (std::size_t s = 0; s < slots_; ++s)
    cell(node, s) = Cell{};
  free_.push_back(node);
}

Index Tree::make_root(std::string_view ns) {
  if (const Index root = find_root(ns)) return root;
  reserve_nodes(1);
  const auto named = roots_.emplace(std::string(ns), kNone).first;
  try {
    const Index root = new_node();
    named->second = root;
    root_names_.emplace(root, named->first);
    return root;
  } catch (...) {
    if (named->second != kNone) free_node(named->second);
    roots_.erase(named);
    throw;
  }
}

// Siblings are a list, oldest first; the oldest's `previous` is the youngest.
void Tree::link(Index parent, Index node) {
  Node& n = nodes_[node];
  Node& p = nodes_[parent];
  n.parent = parent;
  n.next = kNone;
  if (p.first_child == kNone) {
    p.first_child = n.previous = node;
  } else {
    n.previous = nodes_[p.first_child].previous;
    nodes_[n.previous].next = node;
    nodes_[p.first_child].previous = node;
  }
  ++p.children;
}

void Tree::unlink(Index node) {
  Node& n = nodes_[node];
  Node& p = nodes_[n.parent];
  if (p.first_child == node) {
    p.first_child = n.next;
  } else {
    nodes_[n.previous].next = n.next;
  }
  if (n.next != kNone)
    nodes_[n.next].previous = n.previous;
  else if (p.first_child != kNone)
    nodes_[p.first_child].previous = n.previous;
  --p.children;
}

Index Tree::add_child(Index parent, Run<std::uint8_t> key, std::int32_t priority) {
  const Index node = new_node();
  Node& n = nodes_[node];
  n.pages = static_cast<std::uint32_t>(key.size() / page_bytes_);
  n.start = nodes_[parent].end();
  n.home = nodes_[parent].root() ? parent : nodes_[parent].home;
  n.key = std::move(key);
  n.priority = priority;
  n.created = n.accessed = tick_;
  table_.insert(hash(parent, n.key.data()), node);
  link(parent, node);
  return node;
}

// Cuts `node` behind its first `pages` pages and gives the new upper half back. The numbers are the cases of
// docs/design.md, "The cases of a split".
Index Tree::split(Index node, std::uint32_t pages) {
  assert(pages > 0 && pages < nodes_[node].pages);
  const std::size_t key_bytes = std::size_t{pages} * page_bytes_;
  Run<std::uint8_t> key_room = nodes_[node].key.room(key_bytes);
  std::array<Run<std::int32_t>, kMaxComponents * kMaxTiers> ids_room;
  for (std::size_t s = 0; s < slots_; ++s)
    if (row(s).divides() && !cell(node, s).absent()) ids_room[s] = cell(node, s).ids.room(pages);
  const Index upper = new_node();  // nothing below can fail

  Node& n = nodes_[node];
  Node& u = nodes_[upper];
  const std::uint32_t from_parent = hash(n.parent, n.key.data());
  u.key = n.key.take_front(key_bytes, std::move(key_room));
  u.start = n.start;
  u.home = n.home;
  u.pages = pages;
  n.start += pages;
  n.pages -= pages;
  u.created = n.created;  // 5
  u.accessed = n.accessed;
  u.hits = n.hits;
  u.priority = n.priority;

  u.parent = n.parent;  // the upper half takes the node's place among its siblings
  u.next = n.next;
  u.previous = n.previous == node ? upper : n.previous;
  Node& p = nodes_[n.parent];
  if (p.first_child == node)
    p.first_child = upper;
  else
    nodes_[n.previous].next = upper;
  if (n.next != kNone)
    nodes_[n.next].previous = upper;
  else
    nodes_[p.first_child].previous = upper;
  table_.replace(from_parent, node, upper);
  link(upper, node);
  table_.insert(hash(upper, n.key.data()), node);

  for (std::size_t s = 0; s < slots_; ++s) {
    Cell& lower = cell(node, s);
    Cell& half = cell(upper, s);
    half.holders = lower.absent() ? 0 : 1;
    if (row(s).divides()) {
      half.locks = lower.locks;  // 3
      half.residency = lower.residency;
      half.transfer = lower.transfer;                                                       // 4
      if (!lower.absent()) half.ids = lower.ids.take_front(pages, std::move(ids_room[s]));  // 1
    } else if (!lower.absent()) {                                                           // 2
      --cell(u.parent, s).holders;
    }
    refresh(upper, s);
    refresh(node, s);
  }
  ++counters_.splits;
  return upper;
}

bool Tree::dead(Index node) const {
  if (nodes_[node].children) return false;
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
      const auto name = root_names_.find(node);
      roots_.erase(name->second);
      root_names_.erase(name);
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

Rank Tree::rank_of(Index node) const {
  return policy_->rank ? policy_->rank(nodes_[node]) : Rank{kUnranked, 0};
}

// Called whenever a node or its cell has changed. A rank from outside is dropped, to be asked for anew.
void Tree::refresh(Index node, std::size_t slot) {
  Order& order = orders_[slot];
  if (candidate(node, slot))
    order.put(node, rank_of(node), nodes_[node].start);
  else if (order.contains(node))
    order.remove(node);
}

// Puts ids into an absent cell. With `transfer` the cell is in flight, under that node's name.
void Tree::occupy(Index node, std::size_t slot, Run<std::int32_t> ids, Index transfer) {
  Cell& c = cell(node, slot);
  assert(c.absent());
  c.ids = std::move(ids);
  c.transfer = transfer;
  c.residency = transfer == kNone ? Residency::present : Residency::in_flight;
  const std::uint64_t n = c.ids.size();
  if (c.in_flight()) {
    counts_[slot].in_flight += n;
  } else {
    counts_[slot].present += n;
    if (c.locks) counts_[slot].locked += n;
  }
  const Index parent = nodes_[node].parent;
  ++cell(parent, slot).holders;
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
    if (c.locks) counts_[slot].locked -= n;
  }
  c.residency = Residency::absent;
  c.transfer = kNone;
  const Index parent = nodes_[node].parent;
  --cell(parent, slot).holders;
  refresh(node, slot);
  refresh(parent, slot);
  return std::move(c.ids);
}

void Tree::settle(Index node, std::size_t slot) {
  Cell& c = cell(node, slot);
  const std::uint64_t n = c.ids.size();
  counts_[slot].in_flight -= n;
  counts_[slot].present += n;
  if (c.locks) counts_[slot].locked += n;
  c.residency = Residency::present;
  c.transfer = kNone;
  refresh(node, slot);
}

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
  refresh(node, slot);
}

// A window lock begins at a node border, so that it covers exactly the pages it needs (split 3).
void Tree::cut_window_border(Index node, std::size_t slot) {
  if (!row(slot).begins_late()) return;
  const std::uint32_t first = row(slot).first_needed(nodes_[node].end(), page_size_);
  while (nodes_[node].start > first)
    node = nodes_[node].parent;
  if (nodes_[node].start < first && first < nodes_[node].end()) split(node, first - nodes_[node].start);
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
    cut_window_border(node, slot(c, tier));
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    lock_path(node, kNone, slot(c, tier), by);
}

void Tree::touch(Index node, std::uint64_t tick) {
  nodes_[node].accessed = tick;
  for (std::size_t s = 0; s < slots_; ++s)
    if (orders_[s].contains(node)) orders_[s].put(node, rank_of(node), nodes_[node].start);
}

// ---------------------------------------------------------------- match

// The nodes along the key, as far as the key is in the tree at all.
void Tree::walk(Index root, Bytes key, std::uint32_t pages, std::vector<Step>* path) const {
  path->clear();
  Index node = root;
  for (std::uint32_t at = 0; at < pages;) {
    const std::uint8_t* page = key.data() + std::size_t{at} * page_bytes_;
    node = child(node, page);
    if (node == kNone) return;
    const Node& n = nodes_[node];
    const std::uint32_t length = std::min(n.pages, pages - at);
    const std::uint32_t same = 1 + common_pages(n.key.data() + page_bytes_, page + page_bytes_, length - 1);
    path->push_back({node, same});
    if (same < n.pages) return;
    at += same;
  }
}

// How far each tier reaches along a walk: best[t] counts a cell as usable when it is present on any tier up to t.
Tree::Reach Tree::judge(const std::vector<Step>& path) const {
  Reach reach;
  std::array<Coverage, kMaxComponents * kMaxTiers> cover{};
  bool in_flight_only = true;
  for (const Step& step : path) {
    const Node& n = nodes_[step.node];
    const std::uint32_t end = n.start + step.pages;
    bool pending = false;
    std::array<bool, kMaxComponents> usable{};
    for (std::uint32_t tier = 0; tier < tiers_; ++tier) {
      bool all = true;
      for (std::uint32_t c = 0; c < rows_.size(); ++c) {
        const Cell& at = cell(step.node, slot(c, tier));
        usable[c] = usable[c] || at.present();
        pending = pending || at.in_flight();
        Coverage& coverage = cover[slot(c, tier)];
        coverage.pass(rows_[c], usable[c], end, step.pages == n.pages);
        all = all && coverage.allows(rows_[c], end, page_size_);
      }
      if (all) reach.best[tier] = end;
    }
    if (cover[0].allows(rows_[0], end, page_size_)) reach.first = end;
    if (end > reach.best[tiers_ - 1]) {
      in_flight_only = in_flight_only && pending;
      if (in_flight_only) reach.pending += step.pages;
    }
  }
  return reach;
}

// Makes the walk end exactly at `pages`, splitting the node that it ends in; the node there.
Index Tree::cut(std::vector<Step>* path, std::uint32_t pages) {
  while (!path->empty() && nodes_[path->back().node].start >= pages)
    path->pop_back();
  if (path->empty()) return kNone;
  Step& last = path->back();
  const std::uint32_t inside = pages - nodes_[last.node].start;
  if (inside < nodes_[last.node].pages) last.node = split(last.node, inside);
  last.pages = inside;
  return last.node;
}

// How many symbols of `tail` the page at `page` of a node agrees with; 0 when that page is not on the device.
std::uint32_t Tree::agreement(Index node, std::uint32_t page, Bytes tail) const {
  if (!cell(node, 0).present()) return 0;
  const std::uint8_t* own = nodes_[node].key.data() + std::size_t{page} * page_bytes_;
  const std::size_t bytes = std::min<std::size_t>(tail.size(), page_bytes_);
  return static_cast<std::uint32_t>(common_bytes(own, tail.data(), bytes) / symbol_bytes_);
}

// The child of `node` whose first page agrees longest with `tail`, among the youngest.
Tree::Inside Tree::look_inside(Index node, Bytes tail) const {
  Inside best;
  const Index oldest = nodes_[node].first_child;
  Index at = oldest == kNone ? kNone : nodes_[oldest].previous;
  for (std::uint32_t seen = 0; at != kNone && seen < kPartialSiblings; ++seen) {
    const std::uint32_t symbols = agreement(at, 0, tail);
    if (symbols > best.symbols) best = {at, symbols};
    at = at == oldest ? kNone : nodes_[at].previous;
  }
  return best;
}

bool Tree::divides_pages() const {
  return rows_.size() == 1 && rows_[0].leaf_only();
}

MatchResult Tree::match(std::string_view ns, Bytes key, bool partial) {
  const std::uint32_t pages = whole_pages(key);
  MatchResult result;
  ++tick_;
  ++counters_.match_calls;
  counters_.queried_symbols += key.size() / symbol_bytes_;
  const Index root = find_root(ns);
  if (root == kNone) return result;

  walk(root, key, pages, &path_);
  const Reach reach = judge(path_);
  result.pages = reach.best[0];
  result.host_pages = reach.best[tiers_ - 1] - result.pages;
  result.reach_pages = reach.first;
  result.pending_pages = reach.pending;
  const Index deepest = cut(&path_, result.pages + result.host_pages);
  const Index node = cut(&path_, result.pages);
  for (Index at = deepest; at != kNone && !nodes_[at].root(); at = nodes_[at].parent) {
    ++nodes_[at].hits;
    touch(at, tick_);
  }
  result.host_node = deepest ? handle(deepest) : 0;
  result.node = node ? handle(node) : 0;
  counters_.hit_symbols += std::uint64_t{result.pages} * page_size_;

  if (partial && divides_pages()) {
    const Inside inside = look_inside(node ? node : root, key.subspan(std::size_t{result.pages} * page_bytes_));
    if (inside.node != kNone) {
      result.partial = inside.symbols;
      result.partial_id = cell(inside.node, 0).ids[0];
      result.partial_node = handle(inside.node);
    }
  }
  return result;
}

PeekResult Tree::peek(std::string_view ns, Bytes key, bool partial) const {
  const std::uint32_t pages = whole_pages(key);
  const Index root = find_root(ns);
  if (root == kNone) return {};
  std::vector<Step> path;
  walk(root, key, pages, &path);
  const std::uint32_t end = judge(path).best[0];
  if (!partial || !divides_pages()) return {end, 0};
  while (!path.empty() && nodes_[path.back().node].start >= end)
    path.pop_back();
  const Index node = path.empty() ? root : path.back().node;
  const Bytes tail = key.subspan(std::size_t{end} * page_bytes_);
  const bool within = end < nodes_[node].end();
  return {end, within ? agreement(node, end - nodes_[node].start, tail) : look_inside(node, tail).symbols};
}

// ---------------------------------------------------------------- insert

// Ids for pages [begin, pages) must be there: of every component as many as it takes, some at the end of the key.
void Tree::check_ids(std::span<const IdSpan> ids, std::uint32_t begin, std::uint32_t pages) const {
  require(ids.size() == rows_.size(), "ids", ids.size(), "one array for each component");
  bool holds_end = begin == pages;
  for (std::size_t c = 0; c < rows_.size(); ++c) {
    const std::size_t n = ids[c].size();
    if (rows_[c].per_page() && n != pages)
      throw BadValue{"number of page ids", std::to_string(n), "one a whole page of the key: " + std::to_string(pages)};
    if (!rows_[c].per_page() && n > 1) throw BadValue{"number of state ids", std::to_string(n), "0 or 1"};
    IdSpan needed = rows_[c].per_page() ? ids[c].subspan(begin) : ids[c];
    if (rows_[c].begins_late()) needed = needed.subspan(first_id(needed, 0));
    holds_end = holds_end || !needed.empty();
    const std::int32_t least = needed.empty() ? 0 : *std::min_element(needed.begin(), needed.end());
    if (least < 0) throw BadValue{"page id", std::to_string(least), "0 or more"};
  }
  if (!holds_end) throw BadValue{"ids", "none", "an id of some component at the end of the key"};
}

// Whether the key begins with all that leads to a node. Reads the whole prefix.
bool Tree::lies_on(Index node, Bytes key) const {
  for (; !nodes_[node].root(); node = nodes_[node].parent) {
    const Run<std::uint8_t>& run = nodes_[node].key;
    const std::uint8_t* there = key.data() + std::size_t{nodes_[node].start} * page_bytes_;
    if (std::memcmp(run.data(), there, run.size()) != 0) return false;
  }
  return true;
}

// Whether an insertion must stop in front of this node: somebody else's pages are on their way here, or (while its own
// are on their way) there is a hole here that only a finished copy may fill.
bool Tree::blocked(Index node, std::uint32_t tier, bool ready) const {
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const Cell& at = cell(node, slot(c, tier));
    if (at.in_flight()) return true;
    if (!ready && at.absent() && rows_[c].leaf_only()) return true;
  }
  return false;
}

// Goes down along the key from `node`, as far as the tree has it and nothing blocks; splits where the key parts, or
// where a window's ids begin. Notes the absent cells that will get ids. The last node, and whether it was blocked.
std::pair<Index, bool> Tree::descend(Index node, Bytes key, std::span<const IdSpan> ids, std::uint32_t tier,
                                     std::int32_t priority, bool ready, std::vector<Fill>* fills) {
  const std::uint32_t pages = whole_pages(key);
  while (nodes_[node].end() < pages) {
    const std::uint32_t at = nodes_[node].end();
    const std::uint8_t* page = key.data() + std::size_t{at} * page_bytes_;
    Index next = child(node, page);
    if (next == kNone) break;
    if (blocked(next, tier, ready)) return {node, true};
    std::uint32_t length = std::min(nodes_[next].pages, pages - at);
    length = 1 + common_pages(nodes_[next].key.data() + page_bytes_, page + page_bytes_, length - 1);
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].begins_late() && ids[c][at] < 0 && cell(next, slot(c, tier)).absent())
        length = std::min(length, first_id(ids[c], at) - at);
    if (length < nodes_[next].pages) next = split(next, length);
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      const bool wanted = rows_[c].per_page() && ids[c][at] >= 0 && cell(next, slot(c, tier)).absent();
      if (wanted) fills->push_back({next, c, Run<std::int32_t>(ids[c].data() + at, length)});
    }
    nodes_[next].priority = std::max(nodes_[next].priority, priority);
    touch(next, tick_);
    node = next;
  }
  return {node, false};
}

// The rest of the key behind `start` as new nodes: one, or more where a window's ids begin.
std::vector<Tree::Piece> Tree::cut_pieces(std::uint32_t start, Bytes key, std::span<const IdSpan> ids) const {
  std::vector<Piece> pieces;
  for (const std::uint32_t pages = whole_pages(key); start < pages; start = pieces.back().end) {
    Piece piece;
    piece.end = pages;
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].begins_late() && ids[c][start] < 0) piece.end = std::min(piece.end, first_id(ids[c], start));
    const std::uint32_t length = piece.end - start;
    piece.key = Run<std::uint8_t>(key.data() + std::size_t{start} * page_bytes_, std::size_t{length} * page_bytes_);
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].per_page() && ids[c][start] >= 0) piece.ids[c] = Run<std::int32_t>(ids[c].data() + start, length);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// Hangs pieces below `node`; the last one, by which they are named if they are in flight.
Index Tree::hang(Index node, std::vector<Piece> pieces, std::uint32_t tier, std::int32_t priority, bool ready) {
  std::vector<Index> made(pieces.size());
  reserve_nodes(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i)
    made[i] = node = add_child(node, std::move(pieces[i].key), priority);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    counters_.inserted_pages += nodes_[made[i]].pages;
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (pieces[i].ids[c].size()) occupy(made[i], slot(c, tier), std::move(pieces[i].ids[c]), ready ? kNone : node);
  }
  return node;
}

InsertResult Tree::insert(std::string_view ns, Bytes key, std::span<const IdSpan> ids, Handle after,
                          std::int32_t priority, std::uint32_t tier, bool ready, bool verify) {
  const std::uint32_t pages = whole_pages(key);
  require_tier(tier);
  const Index from = resolve(after);
  const std::uint32_t begin = from ? nodes_[from].end() : 0;
  require(begin <= pages, "end of `after` in pages", begin, "at most the pages of the key");
  check_ids(ids, begin, pages);
  if (from) {
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (cell(from, slot(c, tier)).in_flight()) throw BadValue{"after", std::to_string(after), "a node not in flight"};
    if (nodes_[from].home != find_root(ns) || (verify && !lies_on(from, key)))
      throw BadValue{"after", std::to_string(after), "a node on the path of the key, in its namespace"};
  }

  ++tick_;
  ++counters_.insert_calls;
  InsertResult result{after, begin, pages, {}};
  if (pages == 0) return result;

  // First everything that can fail, then everything that changes what the tree holds.
  result.ids.resize(pages - begin);
  Index node = from ? from : make_root(ns);
  std::vector<Fill> fills;
  std::vector<Piece> pieces;
  std::array<Run<std::int32_t>, kMaxComponents> states;
  try {
    bool stopped;
    std::tie(node, stopped) = descend(node, key, ids, tier, priority, ready, &fills);
    if (!stopped) pieces = cut_pieces(nodes_[node].end(), key, ids);
    for (std::uint32_t c = 0; c < rows_.size() && !stopped; ++c)
      if (!rows_[c].per_page() && !ids[c].empty()) states[c] = Run<std::int32_t>(ids[c].data(), 1);
    if (!pieces.empty()) {
      result.existing = nodes_[node].end();
      node = hang(node, std::move(pieces), tier, priority, ready);
    }
  } catch (...) {
    reap(node);  // a root that was made for this
    throw;
  }
  for (Fill& fill : fills) {
    if (fill.component == 0) result.existing = std::min(result.existing, nodes_[fill.node].start);
    if (fill.component == 0) counters_.inserted_pages += fill.ids.size();
    occupy(fill.node, slot(fill.component, tier), std::move(fill.ids), kNone);
  }
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (states[c].size() && cell(node, s).absent()) occupy(node, s, std::move(states[c]), ready ? kNone : node);
  }
  for (std::uint32_t c = 0; c < rows_.size() && !ready; ++c)
    if (cell(node, slot(c, tier)).transfer == node) lock_all(node, tier, +1);

  result.node = handle(node);
  result.pages = nodes_[node].end();
  result.existing = std::min(result.existing, result.pages);
  result.ids.resize(result.pages - begin);
  read_ids(node, from, slot(0, tier), begin, result.ids.data());
  if (nodes_[node].root()) reap(node);  // blocked before the first page
  return result;
}

// ---------------------------------------------------------------- locks and transfers

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
  if (pins(node, tier) == 0) throw NotLocked{handle};
  --pins(node, tier);
  lock_all(node, tier, -1);
  reap(node);
}

void Tree::move_lock(Handle from_handle, Handle to_handle, std::uint32_t tier) {
  require_tier(tier);
  const Index from = resolve(from_handle);
  const Index to = resolve(to_handle);
  if (from == to) return;
  if (from != kNone && pins(from, tier) == 0) throw NotLocked{from_handle};
  if (from == kNone || to == kNone) {
    lock(to_handle, tier);
    unlock(from_handle, tier);
    return;
  }
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    cut_window_border(to, slot(c, tier));
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    if (rows_[c].locks_to_root()) {
      lock_path(to, from, s, +1);  // what lies above `from` keeps its count
    } else {
      lock_path(to, kNone, s, +1);
      lock_path(from, kNone, s, -1);
    }
  }
  ++pins(to, tier);
  --pins(from, tier);
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
  if (!ready) lock_all(node, tier, +1);
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
}

std::vector<Ids> Tree::cancel(Handle handle, std::uint32_t tier) {
  require_tier(tier);
  const Index node = resolve(handle);
  std::vector<Ids> freed(rows_.size());
  bool found = false;
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const std::size_t s = slot(c, tier);
    for (Index at = node; rows_[c].leaf_only() && at != kNone && cell(at, s).transfer == node; at = nodes_[at].parent)
      if (node && cell(at, s).holders > (at == node ? 0u : 1u))
        throw BadValue{"node", std::to_string(handle), "cancelled only after what hangs below it on this tier"};
  }
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

// ---------------------------------------------------------------- evict

bool Tree::only_on(Index node, std::uint32_t tier) const {
  for (std::size_t s = 0; s < slots_; ++s)
    if (s % tiers_ != tier && (!cell(node, s).absent() || pins(node, static_cast<std::uint32_t>(s % tiers_)) > 0))
      return false;
  return true;
}

// Room for all that evicting one node can free, so that taking it cannot fail.
void Tree::reserve_freed(Index node, std::vector<Ids>* freed) const {
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    Ids& ids = (*freed)[c];
    const std::size_t needed = ids.size() + rows_[c].ids(nodes_[node].pages);
    if (needed > ids.capacity()) ids.reserve(needed + needed / 2);
  }
}

// Empties one cell; its ids are the caller's.
void Tree::take_cell(Index node, std::size_t slot, Ids* freed) {
  const Run<std::int32_t> ids = vacate(node, slot);
  freed->insert(freed->end(), ids.data(), ids.data() + ids.size());
}

// Cuts the last pages off a childless node that lies on this tier alone. Its end moves, so its handles go stale.
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
  }
  n.key.drop_back(std::size_t{pages} * page_bytes_);
  n.pages -= pages;
  n.generation = n.generation == 0x7fffffff ? 1 : n.generation + 1;
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    refresh(node, slot(c, tier));
}

void Tree::evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier,
                     std::vector<Ids>* freed) {
  const Component& row = rows_[component];
  const std::uint32_t pages = nodes_[node].pages;
  reserve_freed(node, freed);
  if (!row.from_tail()) {
    if (row.per_page() && want < pages) node = split(node, static_cast<std::uint32_t>(want));
    take_cell(node, slot(component, tier), &(*freed)[component]);
    reap(node);
    return;
  }
  if (want < pages) {
    const auto cut = static_cast<std::uint32_t>(want);
    if (nodes_[node].children == 0 && only_on(node, tier)) {
      trim(node, cut, tier, freed);
      return;
    }
    split(node, pages - cut);
  }
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    if (!cell(node, slot(c, tier)).absent()) take_cell(node, slot(c, tier), &(*freed)[c]);
  reap(node);
}

std::vector<Ids> Tree::evict(std::uint64_t want, std::uint32_t component, std::uint32_t tier) {
  require_tier(tier);
  require_component(component);
  std::vector<Ids> freed(rows_.size());
  Ids& asked = freed[component];
  Order& order = orders_[slot(component, tier)];
  while (asked.size() < want && !order.empty()) {
    const Index node = order.top();
    if (order.rank(node).major == kUnranked) break;
    evict_one(node, want - asked.size(), component, tier, &freed);
  }
  counters_.evicted_pages += asked.size();
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
  order.put(node, rank, nodes_[node].start);
}

// ---------------------------------------------------------------- views

NodeStats Tree::stats(Index node) const {
  const Node& n = nodes_[node];
  return {handle(node), n.created, n.accessed, n.hits, n.start, n.pages, n.priority};
}

std::uint32_t Tree::end(Handle node) const {
  return nodes_[resolve(node)].end();
}

void Tree::copy_ids(Handle handle, std::uint32_t component, std::uint32_t tier, std::int32_t* out) const {
  require_tier(tier);
  require_component(component);
  read_ids(resolve(handle), kNone, slot(component, tier), 0, out);
}

// The ids of the nodes from `node` up to, and without, `stop`: out[page - base], -1 where a cell is absent.
void Tree::read_ids(Index node, Index stop, std::size_t slot, std::uint32_t base, std::int32_t* out) const {
  for (Index at = node; at != stop && at != kNone && !nodes_[at].root(); at = nodes_[at].parent) {
    const Cell& c = cell(at, slot);
    std::int32_t* to = out + (nodes_[at].start - base);
    if (row(slot).per_page() && !c.absent()) {
      std::copy_n(c.ids.data(), c.ids.size(), to);
    } else {
      std::fill_n(to, nodes_[at].pages, -1);
      if (!c.absent()) to[nodes_[at].pages - 1] = c.ids[0];
    }
  }
}

CellCounts Tree::counts(std::uint32_t component, std::uint32_t tier) const {
  require_tier(tier);
  require_component(component);
  return counts_[slot(component, tier)];
}

std::vector<std::string> Tree::namespaces() const {
  std::vector<std::string> names;
  for (const auto& [name, root] : roots_)
    names.push_back(name);
  return names;
}

// Depth first, parents before children, children in the order they came.
std::vector<NodeView> Tree::nodes(std::string_view ns) const {
  std::vector<NodeView> views;
  const Index root = find_root(ns);
  Index at = root == kNone ? kNone : nodes_[root].first_child;
  while (at != kNone) {
    const Node& n = nodes_[at];
    NodeView view{stats(at), handle(n.parent), n.children, {}, {}};
    view.key.assign(reinterpret_cast<const char*>(n.key.data()), n.key.size());
    for (std::size_t s = 0; s < slots_; ++s) {
      const Cell& c = cell(at, s);
      view.cells.push_back({c.residency, c.locks, Ids(c.ids.data(), c.ids.data() + c.ids.size())});
    }
    views.push_back(std::move(view));
    if (n.first_child != kNone) {
      at = n.first_child;
      continue;
    }
    while (at != root && nodes_[at].next == kNone)
      at = nodes_[at].parent;
    at = at == root ? kNone : nodes_[at].next;
  }
  return views;
}

std::size_t Tree::bytes() const {
  std::size_t total = nodes_.capacity() * sizeof(Node) + cells_.capacity() * sizeof(Cell) + table_.bytes() +
                      (pins_.capacity() + free_.capacity()) * sizeof(std::uint32_t);
  for (const Order& order : orders_)
    total += order.bytes();
  for (const Node& n : nodes_)
    total += n.key.held();
  for (const Cell& c : cells_)
    total += c.ids.held() * sizeof(std::int32_t);
  return total;
}

}  // namespace mainstem
