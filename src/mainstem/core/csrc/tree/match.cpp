// Matching: how much of a key is in the tree, and how much of that is usable.
#include <algorithm>

#include "tree/tree.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kPartialSiblings = 32;  // how many children a partial match tries, youngest first

}  // namespace

// Makes the walk end exactly at `pages`, and splits the node there if needed. Returns that node.
Index Tree::end_at(Walk* path, std::uint32_t pages) {
  while (!path->empty() && nodes_[path->back().node].start >= pages)
    path->pop_back();
  if (path->empty()) return kNone;
  Step& last = path->back();
  const std::uint32_t inside = pages - nodes_[last.node].start;
  if (inside < nodes_[last.node].pages) last.node = split(last.node, inside);
  last.pages = inside;
  return last.node;
}

// Returns how many symbols of `tail` agree with page `page` of a node; 0 if that page is not on the device.
std::uint32_t TreeView::agreement(Index node, std::uint32_t page, Bytes tail) const {
  return cells_.cell(node, 0).present() ? nodes_.agreement(node, page, tail) : 0;
}

// Returns the child of `node` whose first page agrees longest with `tail`, among the youngest.
TreeView::Inside TreeView::look_inside(Index node, Bytes tail) const {
  Inside best;
  Index at = nodes_[node].last_child;
  for (std::uint32_t seen = 0; at != kNone && seen < kPartialSiblings; ++seen, at = nodes_[at].previous) {
    const std::uint32_t symbols = agreement(at, 0, tail);
    if (symbols > best.symbols) best = {at, symbols};
  }
  return best;
}

// Whether a walked key parts from another sequence: neither at the end of a leaf, nor at its own end.
bool Tree::parts_from_another(std::uint32_t pages) const {
  if (path_.empty()) return false;
  const Step& last = path_.back();
  const Node& n = nodes_[last.node];
  return n.start + last.pages < pages && (last.pages < n.pages || n.branches);
}

MatchResult Tree::match(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest) {
  const std::uint32_t pages = nodes_.whole_pages(key);
  const Index root = nodes_.find_root(ns);
  nodes_.walk(root, key, pages, &path_, check_rest);

  eviction_.advance();
  ++counters_.match_calls;
  counters_.queried_symbols += key.size() / nodes_.symbol_bytes;
  if (root == kNone) {
    if (eviction_.listens()) eviction_.asked(ns, path_, key);
    return {};
  }
  const Reach reach = cells_.reach(path_);
  const bool parts = eviction_.has_standings() && parts_from_another(pages);
  MatchResult result{PeekResult(reach, cells_.tiers)};
  result.pending_pages = reach.pending;
  const Index deepest = end_at(&path_, result.pages + result.host_pages);
  if (eviction_.listens()) eviction_.asked(ns, path_, key);
  eviction_.found(path_);
  const Index node = end_at(&path_, result.pages);
  if (parts && node != kNone) nodes_[node].forked = true;
  for (std::size_t column = 0; eviction_.has_standings() && column < cells_.columns; ++column)
    eviction_.ended(cells_.tier_of(column) == kDevice ? node : deepest, column, kMatched);
  result.host_node = nodes_.handle(deepest);
  result.node = nodes_.handle(node);
  counters_.hit_symbols += std::uint64_t{result.pages} * nodes_.page_size;

  if (partial && divides_pages()) {
    const Bytes tail = key.subspan(std::size_t{result.pages} * nodes_.page_bytes);
    const Inside inside = look_inside(node ? node : root, tail);
    if (inside.node != kNone) {
      result.partial = inside.symbols;
      result.partial_id = cells_.cell(inside.node, 0).ids[0];
      result.partial_node = nodes_.handle(inside.node);
    }
  }
  return result;
}

Handle Tree::locate(std::string_view ns, Bytes key, std::uint32_t pages) {
  const Index root = nodes_.find_root(ns);
  nodes_.walk(root, key, std::min(pages, nodes_.whole_pages(key)), &path_, {});
  if (path_.empty() || nodes_[path_.back().node].start + path_.back().pages < pages) return 0;
  return nodes_.handle(end_at(&path_, pages));
}

std::uint32_t TreeView::extent(std::string_view ns, Bytes key) const {
  Walk path;
  nodes_.walk(nodes_.find_root(ns), key, nodes_.whole_pages(key), &path, {});
  std::uint32_t pages = 0;
  for (const Step& step : path) {
    if (cells_.rows[0].leaf_only() && cells_.empty_of(step.node, 0)) break;
    pages = nodes_[step.node].start + step.pages;
  }
  return pages;
}

PeekResult TreeView::peek(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest) const {
  const Index root = nodes_.find_root(ns);
  Walk path;
  nodes_.walk(root, key, nodes_.whole_pages(key), &path, check_rest);
  if (root == kNone) return {};
  PeekResult result(cells_.reach(path), cells_.tiers);
  if (!partial || !divides_pages()) return result;
  const std::uint32_t end = result.pages;
  while (!path.empty() && nodes_[path.back().node].start >= end)
    path.pop_back();
  const Index node = path.empty() ? root : path.back().node;
  const Bytes tail = key.subspan(std::size_t{end} * nodes_.page_bytes);
  const bool within = end < nodes_[node].end();
  result.partial = within ? agreement(node, end - nodes_[node].start, tail) : look_inside(node, tail).symbols;
  return result;
}

// Returns the child used last whose key begins with `tail`, which is shorter than a page.
Index TreeView::child_used_last(Index node, Bytes tail) const {
  Index best = kNone;
  Index at = nodes_[node].last_child;
  for (std::uint32_t seen = 0; at != kNone && seen < kPartialSiblings; ++seen, at = nodes_[at].previous) {
    const bool later = best == kNone || nodes_[at].accessed > nodes_[best].accessed;
    if (later && std::equal(tail.begin(), tail.end(), nodes_[at].key.data())) best = at;
  }
  return best;
}

std::string TreeView::continuation(std::string_view ns, Bytes key, std::size_t most) const {
  const std::uint32_t pages = nodes_.whole_pages(key);
  const Index root = nodes_.find_root(ns);
  Walk path;
  nodes_.walk(root, key, pages, &path, {});
  const std::uint32_t found = path.empty() ? 0 : nodes_[path.back().node].start + path.back().pages;
  if (root == kNone || found < pages) return {};

  Index node = path.empty() ? root : path.back().node;
  std::size_t at = nodes_[node].key.size();  // of the node's key
  if (!path.empty()) at = std::size_t{path.back().pages} * nodes_.page_bytes;
  const Bytes tail = key.subspan(std::size_t{pages} * nodes_.page_bytes);
  if (node != root && at < nodes_[node].key.size()) {
    if (!std::equal(tail.begin(), tail.end(), nodes_[node].key.data() + at)) return {};
  } else {
    node = child_used_last(node, tail);
    at = 0;
  }
  std::string symbols;
  const std::size_t bytes = most * nodes_.symbol_bytes;
  for (at += tail.size(); node != kNone && symbols.size() < bytes; node = child_used_last(node, {}), at = 0) {
    const std::string_view own = text(nodes_[node].key).substr(at);
    symbols += own.substr(0, bytes - symbols.size());
  }
  return symbols;
}

}  // namespace mainstem
