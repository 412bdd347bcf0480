// check(): verifies every structural rule of the tree from scratch. Deliberately slow.
#include <string>
#include <unordered_set>

#include "tree.h"

namespace mainstem {

void Tree::broken(Index node, const std::string& rule) const {
  throw Corrupt{"node " + std::to_string(node) + ": " + rule};
}

void Tree::check() const {
  std::size_t below_roots = 0;
  std::size_t roots = 0;
  for (Index node = 1; node < nodes_.size(); ++node) {
    if (!nodes_[node].live) continue;
    (nodes_[node].root() ? roots : below_roots) += !nodes_[node].detached;
    check_node(node);
    check_cells(node);
    if (remembers_) check_name(node);
  }
  if (below_roots + roots != table_.size()) broken(kNone, "the child table holds each node once");
  if (roots != roots_) broken(kNone, "roots are counted");
  check_free();
  check_locks();
  check_counts();
  check_pages();
}

void Tree::check_free() const {
  std::size_t free = 0;
  for (Index node = free_; node != kNone; node = nodes_[node].next) {
    if (nodes_[node].live) broken(node, "a free node is not alive");
    for (const Order& order : orders_)
      if (order.contains(node)) broken(node, "a free node cannot be evicted");
    ++free;
  }
  std::size_t alive = 0;
  for (const Node& n : nodes_)
    alive += n.live;
  if (free != free_count_ || alive + free != nodes_.size()) broken(kNone, "a node is alive or free");
}

void Tree::check_node(Index node) const {
  const Node& n = nodes_[node];
  if (n.root()) {
    const std::string_view name(reinterpret_cast<const char*>(n.key.data()), n.key.size());
    if (find_root(name) != node) broken(node, "a root is found by its name");
    if (n.pages != 0 || (n.branches == 0 && pins(node, 0) == 0))
      broken(node, "a root has no pages and at least one child");
  } else {
    if (n.pages == 0) broken(node, "a node holds at least one page");
    if (n.key.size() != std::size_t{n.pages} * page_bytes_) broken(node, "the key has the length of the pages");
    if (n.start != nodes_[n.parent].end()) broken(node, "a node begins where its parent ends");
    const auto itself = [&](Index found) { return found == node; };
    const bool found = table_.find(hash(n.parent, n.key.data()), itself) == node;
    if (found == (n.detached != 0)) broken(node, "a node is found by its parent and first page");
    if ((n.detached || nodes_[n.parent].removed) && !n.removed) broken(node, "children of a removed node are removed");
    if (n.removed && !n.detached && !nodes_[n.parent].removed) broken(node, "the first removed node is detached");
    if (dead(node)) broken(node, "a node has a cell, a child or a lock");
  }
  std::uint32_t children = 0;
  Index before = kNone;
  for (Index at = n.first_child; at != kNone; at = nodes_[at].next) {
    if (nodes_[at].parent != node || nodes_[at].previous != before) broken(at, "siblings are linked both ways");
    before = at;
    ++children;
  }
  if (children != n.children() || before != n.last_child) broken(node, "children are counted, and the last is known");
  const auto word = [&](Index child) { return load_word(nodes_[child].key.data() + n.fork_at(), 4); };
  if (n.forks() && (word(n.first_child) != n.fork_word || word(n.last_child) == n.fork_word))
    broken(node, "two children part at the recorded fork");
}

void Tree::check_cells(Index node) const {
  const Node& n = nodes_[node];
  for (std::size_t s = 0; s < slots_; ++s) {
    const Cell& c = cell(node, s);
    const std::size_t expected = c.absent() ? 0 : row(s).ids(n.pages);
    if (c.ids.size() != expected) broken(node, "a cell has an id for each page, or none");
    if (c.in_flight() && (c.transfer >= nodes_.size() || !nodes_[c.transfer].live))
      broken(node, "a cell in flight names its transfer");
    if (n.root() && !c.absent()) broken(node, "a root holds no pages");
    std::uint32_t holders = 0;
    for (Index at = n.first_child; at != kNone; at = nodes_[at].next)
      holders += !cell(at, s).absent();
    if (row(s).leaf_only() && c.absent() && holders > 0 && !n.root() && !n.removed)
      broken(node, "a child holds a cell only if its parent does");
    std::uint32_t detached = 0;
    for (Index at = 1; pins(node, 0) && at < nodes_.size(); ++at) {
      if (!nodes_[at].live || nodes_[at].parent != node || !nodes_[at].detached) continue;
      holders += !cell(at, s).absent();
      ++detached;
    }
    if (pins(node, 0) != locks_taken(node, 0) + detached) broken(node, "a detached node pins its parent");
    if (holders != c.holders) broken(node, "children that hold a cell are counted");
    const Queues order = queues(s);
    if (order.contains(node) != candidate(node, s))
      broken(node, "exactly the cells that can be evicted are in the order");
    if (replacement(s) && replacement(s)->offers(node, candidate(node, s)) != candidate(node, s))
      broken(node, "the policy knows the candidates");
    if (!order.contains(node)) continue;
    const bool known = policy_.rank || row(s).weighs || goes_first(node, s);
    if (!order.holds(node, known ? place_of(node, s) : Place{order.rank(node)}, n.start))
      broken(node, "the order has the node's rank");
  }
}

void Tree::check_name(Index node) const {
  const Node& n = nodes_[node];
  const std::uint64_t name = n.root() ? Identity::mix(n.key.data(), n.key.size())
                                      : Identity::of(names_[n.parent], n.key.data(), n.pages, page_bytes_);
  if (names_[node] != name) broken(node, "a node has the name of its last page");
}

// Recomputes all locks: the cells must count exactly what pins and transfers hold.
void Tree::check_locks() const {
  std::vector<std::uint32_t> expected(cells_.size(), 0);
  const auto hold = [&](Index node, std::uint32_t tier, std::uint32_t times) {
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      const std::size_t s = slot(c, tier);
      if (!rows_[c].per_page()) {
        expected[std::size_t{node} * slots_ + s] += times;
        continue;
      }
      const std::uint32_t first = rows_[c].first_needed(nodes_[node].end(), page_size_);
      Index at = node;
      for (; !nodes_[at].root() && nodes_[at].start >= first; at = nodes_[at].parent)
        expected[std::size_t{at} * slots_ + s] += times;
      if (nodes_[at].end() > first) broken(node, "a window lock begins at a node boundary");
    }
  };
  for (Index node = 1; node < nodes_.size(); ++node) {
    if (!nodes_[node].live) continue;
    for (std::uint32_t tier = 0; tier < tiers_; ++tier) {
      std::uint32_t times = locks_taken(node, tier);
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        times += cell(node, slot(c, tier)).transfer == node;
      if (times) hold(node, tier, times);
    }
  }
  for (Index node = 1; node < nodes_.size(); ++node)
    for (std::size_t s = 0; s < slots_; ++s)
      if (cell(node, s).locks != expected[std::size_t{node} * slots_ + s]) broken(node, "locks add up along the path");
}

void Tree::check_counts() const {
  for (std::size_t s = 0; s < slots_; ++s) {
    CellCounts sum;
    std::size_t candidates = 0;
    std::array<std::uint64_t, kQueues> pages{};
    for (Index node = 1; node < nodes_.size(); ++node) {
      const Cell& c = cell(node, s);
      if (c.in_flight()) sum.in_flight += c.ids.size();
      if (c.present()) sum.present += c.ids.size();
      if (c.present() && c.locks) sum.locked += c.ids.size();
      candidates += queues(s).contains(node);
      if (c.present() && replacement(s)) pages[replacement(s)->queue(node)] += c.ids.size();
    }
    for (std::uint32_t queue = 0; replacement(s) && queue < kQueues; ++queue)
      if (pages[queue] != replacement(s)->size(queue)) broken(kNone, "the pages of each queue are counted");
    const CellCounts& kept = counts_[s];
    if (sum.present != kept.present || sum.locked != kept.locked || sum.in_flight != kept.in_flight)
      broken(kNone, "pages are counted");
    if (!queues(s).sound() || queues(s).size() != candidates) broken(kNone, "the order is a heap");
  }
}

void Tree::check_pages() const {
  for (std::size_t s = 0; s < slots_; ++s) {
    std::unordered_set<std::int32_t> seen;
    for (Index node = 1; node < nodes_.size(); ++node) {
      const Cell& c = cell(node, s);
      for (std::size_t i = 0; i < c.ids.size(); ++i)
        if (!seen.insert(c.ids[i]).second) broken(node, "page " + std::to_string(c.ids[i]) + " has one owner");
    }
  }
}

}  // namespace mainstem
