#include "structure/structure.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <utility>

namespace mainstem {

namespace {

// The first position where two different byte strings differ, by bisection.
std::size_t first_difference(const std::uint8_t* a, const std::uint8_t* b, std::size_t n) {
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

Structure::Structure(std::uint32_t symbol_bytes_, std::uint32_t page_size_, std::uint64_t seed)
    : symbol_bytes(symbol_bytes_), page_size(page_size_), page_bytes(symbol_bytes_ * page_size_), seed_(seed) {
  require(symbol_bytes == 4 || symbol_bytes == 8 || symbol_bytes == 16, "symbol_bytes", symbol_bytes, "4, 8 or 16");
  require(page_size >= 1 && page_size <= (1u << 20), "page_size", page_size, "1 to 1048576");
}

std::size_t Structure::bytes() const {
  std::size_t total = nodes_.bytes() + table_.bytes();
  for (const Node& n : nodes_)
    total += n.key.heap_bytes();
  return total;
}

// ---------------------------------------------------------------- addresses

Handle Structure::handle(Index node) const {
  return nodes_[node].root() ? 0 : Handle{nodes_[node].generation} << 32 | Handle{node};
}

Index Structure::resolve(Handle handle) const {
  if (handle == 0) return kNone;
  const auto node = static_cast<std::uint64_t>(handle) & 0xffffffffu;
  const auto generation = static_cast<std::uint64_t>(handle) >> 32;
  if (handle < 0 || node == kNone || node >= nodes_.size() || !nodes_[node].live ||
      nodes_[node].generation != generation)
    throw StaleHandle{handle};
  return static_cast<Index>(node);
}

// A root's key is the name of its namespace.
Index Structure::find_root(std::string_view ns) const {
  return table_.find(hash(ns), [&](Index node) { return nodes_[node].root() && text(nodes_[node].key) == ns; });
}

Index Structure::root_of(Index node) const {
  while (!nodes_[node].root())
    node = nodes_[node].parent;
  return node;
}

std::uint32_t Structure::whole_pages(Bytes key) const {
  require(key.size() % symbol_bytes == 0, "key length in bytes", key.size(), "a multiple of the symbol's bytes");
  require(key.size() <= std::numeric_limits<std::uint32_t>::max(), "key length in bytes", key.size(), "below 4 GiB");
  return static_cast<std::uint32_t>(key.size() / page_bytes);
}

std::string Structure::symbols(Index node, std::uint32_t begin) const {
  std::string key(std::size_t{nodes_[node].end() - begin} * page_bytes, '\0');
  for (Index at = node; !nodes_[at].root() && nodes_[at].end() > begin; at = nodes_[at].parent) {
    const std::uint32_t from = std::max(begin, nodes_[at].start);
    text(nodes_[at].key)
        .substr(std::size_t{from - nodes_[at].start} * page_bytes)
        .copy(key.data() + std::size_t{from - begin} * page_bytes, key.size());
  }
  return key;
}

// Whether the key begins with the path to a node. Reads the whole prefix.
bool Structure::lies_on(std::string_view ns, Bytes key, Index node) const {
  if (node == kNone) return true;
  if (std::size_t{nodes_[node].end()} * page_bytes > key.size()) return false;
  for (; !nodes_[node].root(); node = nodes_[node].parent) {
    const Key& run = nodes_[node].key;
    const std::uint8_t* there = key.data() + std::size_t{nodes_[node].start} * page_bytes;
    if (std::memcmp(run.data(), there, run.size()) != 0) return false;
  }
  return node == find_root(ns);
}

// ---------------------------------------------------------------- the walk

std::uint32_t Structure::common_pages(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t pages) const {
  const std::size_t bytes = std::size_t{pages} * page_bytes;
  return std::memcmp(a, b, bytes) == 0 ? pages : static_cast<std::uint32_t>(first_difference(a, b, bytes) / page_bytes);
}

Step Structure::step_down(Index parent, const std::uint8_t* page, std::uint32_t pages) const {
  Step step{kNone, 0};
  const auto agrees = [&](Index node) {
    const Node& n = nodes_[node];
    if (n.parent != parent) return false;
    step.pages = common_pages(n.key.data(), page, std::min(n.pages, pages));
    return step.pages > 0;
  };
  const Node& p = nodes_[parent];
  if (p.branches == Node::kChild) {
    step.node = agrees(p.first_child) ? p.first_child : kNone;
  } else if (p.forks()) {
    const bool first = load_word(page + p.fork_at(), 4) == p.fork_word;
    const Index guess = first ? p.first_child : p.last_child;
    step.node = agrees(guess) ? guess : kNone;
  } else if (p.first_child != kNone) {
    step.node = table_.find(hash(parent, page), agrees);
  }
  return step;
}

void Structure::walk(Index root, Bytes key, std::uint32_t pages, Walk* path, const CheckRest& check_rest) const {
  path->clear();
  std::uint32_t at = 0;
  for (Index node = root; node != kNone && at < pages;) {
    const Step step = step_down(node, key.data() + std::size_t{at} * page_bytes, pages - at);
    if (step.node == kNone) break;
    path->push_back(step);
    at += step.pages;
    node = step.pages == nodes_[step.node].pages ? step.node : kNone;
  }
  if (check_rest) check_rest(std::size_t{at} * page_size);
}

std::uint32_t Structure::agreement(Index node, std::uint32_t page, Bytes tail) const {
  const std::uint8_t* own = nodes_[node].key.data() + std::size_t{page} * page_bytes;
  const std::size_t bytes = std::min<std::size_t>(tail.size(), page_bytes);
  const bool same = std::memcmp(own, tail.data(), bytes) == 0;
  return static_cast<std::uint32_t>((same ? bytes : first_difference(own, tail.data(), bytes)) / symbol_bytes);
}

// ---------------------------------------------------------------- nodes come and go

std::size_t Structure::room_for(std::size_t count) const {
  const std::size_t needed = nodes_.size() + count;
  return count <= free_count_ || needed <= nodes_.capacity() ? 0 : with_spare(needed);
}

Index Structure::new_node() noexcept {
  Index node = free_;
  if (node == kNone) {
    node = static_cast<Index>(nodes_.size());
    nodes_.resize(nodes_.size() + 1);
    nodes_.back().generation = 1;
  } else {
    free_ = std::exchange(nodes_[node].next, kNone);
    --free_count_;
  }
  nodes_[node].live = true;
  return node;
}

void Structure::free(Index node) noexcept {
  nodes_[node].outdate();
  Node fresh;
  fresh.generation = nodes_[node].generation;
  fresh.next = std::exchange(free_, node);
  nodes_[node] = std::move(fresh);
  ++free_count_;
}

void Structure::add_root(Index root, Key name) noexcept {
  nodes_[root].key = std::move(name);
  table_.insert(hash(text(nodes_[root].key)), root);
  ++roots_;
}

void Structure::add_child(Index parent, Index node, Key key) noexcept {
  Node& n = nodes_[node];
  n.pages = static_cast<std::uint32_t>(key.size() / page_bytes);
  n.start = nodes_[parent].end();
  n.key = std::move(key);
  n.removed = nodes_[parent].removed;
  table_.insert(hash(parent, n.key.data()), node);
  link(parent, node);
}

void Structure::remove(Index node) noexcept {
  const Node& n = nodes_[node];
  if (n.root()) {
    table_.erase(hash(text(n.key)), node);
    --roots_;
  } else if (!n.detached) {
    table_.erase(hash(n.parent, n.key.data()), node);
    unlink(node);
  }
}

void Structure::detach(Index node) noexcept {
  Node& n = nodes_[node];
  table_.erase(hash(n.parent, n.key.data()), node);
  unlink(node);
  n.next = n.previous = kNone;
  n.detached = true;
}

void Structure::link(Index parent, Index node) {
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

void Structure::unlink(Index node) {
  Node& n = nodes_[node];
  Node& p = nodes_[n.parent];
  (n.previous == kNone ? p.first_child : nodes_[n.previous].next) = n.next;
  (n.next == kNone ? p.last_child : nodes_[n.next].previous) = n.previous;
  p.branches = (p.children() - 1) * Node::kChild;
  if (p.children() == 2) note_fork(n.parent);
}

// Records a word that distinguishes two children, so that a walk reads only one of them.
void Structure::note_fork(Index parent) {
  Node& p = nodes_[parent];
  const std::uint8_t* one = nodes_[p.first_child].key.data();
  const std::uint8_t* two = nodes_[p.last_child].key.data();
  const auto at = std::mismatch(one, one + page_bytes, two).first - one;
  p.branches = (static_cast<std::uint32_t>(at) & ~3u) | Node::kFork;
  p.fork_word = static_cast<std::uint32_t>(load_word(one + p.fork_at(), 4));
}

// Gives `node` the parent of `of`, and its place among the children; both begin with the same page.
void Structure::take_place(Index node, Index of) {
  Node& n = nodes_[node];
  const Node& o = nodes_[of];
  n.parent = o.parent;
  n.next = o.next;
  n.previous = o.previous;
  Node& p = nodes_[n.parent];
  (n.previous == kNone ? p.first_child : nodes_[n.previous].next) = node;
  (n.next == kNone ? p.last_child : nodes_[n.next].previous) = node;
}

// ---------------------------------------------------------------- split and join
//
//        parent                  parent
//          |                       |
//   node [start ........ end)    upper [start .. k)      `node` keeps its end, and therefore its handles.
//          |                       |                     Of a detached node, the upper half is detached.
//       children                 node  [k ..... end)
//                                  |
//                               children

void Structure::split(Index node, Index upper, std::uint32_t pages, Key::Room room) noexcept {
  assert(pages > 0 && pages < nodes_[node].pages);
  Node& n = nodes_[node];
  Node& u = nodes_[upper];
  const std::uint32_t from_parent = hash(n.parent, n.key.data());
  u.key = n.key.take_front(std::size_t{pages} * page_bytes, std::move(room));
  u.start = n.start;
  u.pages = pages;
  n.start += pages;
  n.pages -= pages;
  u.created = n.created;
  u.accessed = n.accessed;
  u.hits = n.hits;
  u.priority = n.priority;
  u.removed = n.removed;
  u.demoted = n.demoted;
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
}

void Structure::join(Index lower, Key::Room room) noexcept {
  Node& l = nodes_[lower];
  const Index upper = l.parent;
  Node& u = nodes_[upper];
  table_.erase(hash(upper, l.key.data()), lower);
  if (u.detached) {
    l.detached = true;
    l.parent = u.parent;
    l.next = l.previous = kNone;
  } else {
    table_.replace(hash(u.parent, u.key.data()), upper, lower);
    take_place(lower, upper);
  }
  u.key.append(l.key, std::move(room));
  l.key = std::move(u.key);
  l.start = u.start;
  l.pages += u.pages;
}

void Structure::drop_back(Index node, std::uint32_t pages) noexcept {
  Node& n = nodes_[node];
  n.key.drop_back(std::size_t{pages} * page_bytes);
  n.pages -= pages;
  n.outdate();
}

// ---------------------------------------------------------------- check

void Structure::check() const {
  std::size_t below_roots = 0, roots = 0, free = 0, alive = 0;
  for (Index node = 1; node < nodes_.size(); ++node)
    if (nodes_[node].live) (nodes_[node].root() ? roots : below_roots) += !nodes_[node].detached;
  if (below_roots + roots != table_.size()) broken(kNone, "the child table holds each node once");
  if (roots != roots_) broken(kNone, "roots are counted");
  for (Index node = free_; node != kNone; node = nodes_[node].next) {
    if (nodes_[node].live) broken(node, "a free node is not alive");
    ++free;
  }
  for (const Node& n : nodes_)
    alive += n.live;
  if (free != free_count_ || alive + free != nodes_.size()) broken(kNone, "a node is alive or free");
}

void Structure::check_node(Index node) const {
  const Node& n = nodes_[node];
  if (n.root()) {
    if (find_root(text(n.key)) != node) broken(node, "a root is found by its name");
    if (n.pages != 0) broken(node, "a root has no pages");
  } else {
    if (n.pages == 0) broken(node, "a node holds at least one page");
    if (n.key.size() != std::size_t{n.pages} * page_bytes) broken(node, "the key has the length of the pages");
    if (n.start != nodes_[n.parent].end()) broken(node, "a node begins where its parent ends");
    const auto itself = [&](Index found) { return found == node; };
    const bool found = table_.find(hash(n.parent, n.key.data()), itself) == node;
    if (found == (n.detached != 0)) broken(node, "a node is found by its parent and first page");
    if ((n.detached || nodes_[n.parent].removed) && !n.removed) broken(node, "children of a removed node are removed");
    if (n.removed && !n.detached && !nodes_[n.parent].removed) broken(node, "the first removed node is detached");
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

}  // namespace mainstem
