// Views: read-only descriptions of the tree.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "tree.h"

namespace mainstem {

NodeStats Tree::stats(Index node) const {
  const Node& n = nodes_[node];
  return {handle(node), n.created, n.accessed, n.hits, n.start, n.pages, n.priority};
}

std::uint32_t Tree::end(Handle node) const {
  return nodes_[resolve(node)].end();
}

std::uint32_t Tree::start(Handle node) const {
  return nodes_[resolve(node)].start;
}

Handle Tree::parent(Handle node) const {
  const Index at = resolve(node);
  if (at == kNone || nodes_[at].root() || nodes_[nodes_[at].parent].root()) return 0;
  return handle(nodes_[at].parent);
}

std::vector<Handle> Tree::lacking(Handle handle_, std::uint32_t from, std::uint32_t to, std::uint32_t hits) const {
  require_tier(from);
  require_tier(to);
  std::vector<Index> path;
  const Index node = resolve(handle_);
  if (nodes_[node].removed) return {};  // removed nodes are not worth a copy
  for (Index at = node; at != kNone && !nodes_[at].root(); at = nodes_[at].parent)
    path.push_back(at);
  std::vector<Handle> found;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    bool lacks = false, gap = false;
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      const bool missing = cell(*at, slot(c, to)).absent();
      const bool present = cell(*at, slot(c, from)).present();
      lacks = lacks || (missing && present);
      gap = gap || (missing && !present && rows_[c].leaf_only());
    }
    if (gap || (lacks && nodes_[*at].hits < hits)) break;
    if (lacks) found.push_back(handle(*at));
  }
  return found;
}

Handle Tree::in_flight_above(Handle node, std::uint32_t tier) const {
  require_tier(tier);
  Index at = resolve(node);
  while (at != kNone && !nodes_[at].root()) {
    at = nodes_[at].parent;
    const Cell& above = cell(at, slot(0, tier));
    if (above.in_flight()) return handle(above.transfer);
  }
  return 0;
}

Residency Tree::residency(Handle node, std::uint32_t component, std::uint32_t tier) const {
  require_tier(tier);
  require_component(component);
  return cell(resolve(node), slot(component, tier)).residency();
}

std::vector<Handle> Tree::hottest(std::size_t limit, std::uint32_t tier) const {
  require_tier(tier);
  std::vector<Index> found;
  for (Index node = 1; node < nodes_.size(); ++node)
    if (nodes_[node].live && !nodes_[node].root() && !nodes_[node].removed && cell(node, slot(0, tier)).present())
      found.push_back(node);
  limit = std::min(limit, found.size());
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(limit), found.end(),
                    [&](Index a, Index b) {
                      const Node &one = nodes_[a], &two = nodes_[b];
                      return std::tuple(two.hits, std::uint64_t{two.accessed}, two.end(), a) <
                             std::tuple(one.hits, std::uint64_t{one.accessed}, one.end(), b);
                    });
  std::vector<Handle> handles;
  for (std::size_t at = 0; at < limit; ++at)
    handles.push_back(handle(found[at]));
  return handles;
}

Ids Tree::own_ids(Handle node, std::uint32_t component, std::uint32_t tier) const {
  require_tier(tier);
  require_component(component);
  const Cell& c = cell(resolve(node), slot(component, tier));
  return c.present() ? Ids(c.ids.data(), c.ids.data() + c.ids.size()) : Ids{};
}

namespace {

std::string_view text(const Run<std::uint8_t>& run) {
  return {reinterpret_cast<const char*>(run.data()), run.size()};
}

}  // namespace

std::vector<PathSpan> Tree::hot_spans(std::uint32_t tier) const {
  std::vector<PathSpan> spans;
  std::vector<std::int64_t> number(nodes_.size(), -1);  // index of the span that a node is in
  for (const Handle hot : hottest(nodes_.size(), tier)) {
    const Index node = resolve(hot);
    Index above = node;
    while (number[above] < 0 && !nodes_[above].root())
      above = nodes_[above].parent;
    if (above == node) continue;
    const auto mine = static_cast<std::int64_t>(spans.size());
    const std::uint32_t at = nodes_[above].root() ? 0 : nodes_[above].end();
    PathSpan& span = spans.emplace_back(PathSpan{number[above], at, {}, symbols(node, at)});
    if (number[above] < 0) {
      span.ns = text(nodes_[above].key);
      number[above] = mine;
    }
    for (Index on = node; number[on] < 0; on = nodes_[on].parent)
      number[on] = mine;
  }
  return spans;
}

std::pair<std::string, std::string> Tree::path_key(Handle handle_, std::uint32_t begin) const {
  const Index node = resolve(handle_);
  if (node == kNone) return {};
  return {std::string(text(nodes_[root_of(node)].key)), symbols(node, std::min(begin, nodes_[node].end()))};
}

std::string Tree::symbols(Index node, std::uint32_t begin) const {
  std::string key(std::size_t{nodes_[node].end() - begin} * page_bytes_, '\0');
  for (Index at = node; !nodes_[at].root() && nodes_[at].end() > begin; at = nodes_[at].parent) {
    const std::uint32_t from = std::max(begin, nodes_[at].start);
    text(nodes_[at].key)
        .substr(std::size_t{from - nodes_[at].start} * page_bytes_)
        .copy(key.data() + std::size_t{from - begin} * page_bytes_, key.size());
  }
  return key;
}

bool Tree::has(Handle handle, std::uint32_t component, std::uint32_t tier, std::uint32_t begin) const {
  require_tier(tier);
  require_component(component);
  const std::size_t s = slot(component, tier);
  const Index node = resolve(handle);
  if (!row(s).per_page()) return node != kNone && cell(node, s).present();
  for (Index at = node; at != kNone && nodes_[at].end() > begin; at = nodes_[at].parent)
    if (!cell(at, s).present()) return false;
  return true;
}

void Tree::copy_ids(Handle handle, std::uint32_t component, std::uint32_t tier, std::uint32_t begin,
                    std::int32_t* out) const {
  require_tier(tier);
  require_component(component);
  const std::size_t s = slot(component, tier);
  for (Index at = resolve(handle); at != kNone && nodes_[at].end() > begin; at = nodes_[at].parent) {
    const Cell& c = cell(at, s);
    const std::uint32_t skipped = std::max(begin, nodes_[at].start) - nodes_[at].start;
    const std::uint32_t pages = nodes_[at].pages - skipped;
    std::int32_t* to = out + (nodes_[at].start + skipped - begin);
    if (row(s).per_page() && !c.absent()) {
      std::memcpy(to, c.ids.data() + skipped, pages * sizeof(std::int32_t));
    } else {
      std::fill_n(to, pages, -1);
      if (!c.absent()) to[pages - 1] = c.ids[0];
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
  for (Index node = 1; node < nodes_.size(); ++node) {
    const Run<std::uint8_t>& name = nodes_[node].key;
    if (nodes_[node].live && nodes_[node].root())
      names.emplace_back(reinterpret_cast<const char*>(name.data()), name.size());
  }
  std::sort(names.begin(), names.end());
  return names;
}

NodeView Tree::view(Index node) const {
  const Node& n = nodes_[node];
  NodeView view{stats(node), handle(n.parent), n.children(), n.removed != 0, {}, {}};
  view.key.assign(reinterpret_cast<const char*>(n.key.data()), n.key.size());
  for (std::size_t s = 0; s < slots_; ++s) {
    const Cell& c = cell(node, s);
    view.cells.push_back({c.residency(), c.locks, Ids(c.ids.data(), c.ids.data() + c.ids.size())});
  }
  return view;
}

// Depth first, parents before children, children by age. Removed nodes come last.
std::vector<NodeView> Tree::nodes(std::string_view ns) const {
  std::vector<NodeView> views;
  const Index root = find_root(ns);
  const auto show = [&](Index node) {
    if (node != root) views.push_back(view(node));
    return true;
  };
  if (root == kNone) return views;
  every_from(root, show);
  std::vector<Index> removed;  // a removed node may follow another, which starts earlier
  for (Index node = 1; node < nodes_.size(); ++node)
    if (nodes_[node].live && nodes_[node].detached && root_of(node) == root) removed.push_back(node);
  std::sort(removed.begin(), removed.end(),
            [&](Index a, Index b) { return std::tie(nodes_[a].start, a) < std::tie(nodes_[b].start, b); });
  for (const Index node : removed)
    every_from(node, show);
  return views;
}

Index Tree::root_of(Index node) const {
  while (!nodes_[node].root())
    node = nodes_[node].parent;
  return node;
}

std::size_t Tree::bytes() const {
  std::size_t total = nodes_.bytes() + cells_.bytes() + pins_.bytes() + table_.bytes();
  for (const Order& order : orders_)
    total += order.bytes();
  total += standings_.bytes() + names_.bytes();
  for (const auto& replacement : replacements_)
    if (replacement) total += replacement->bytes();
  for (const Node& n : nodes_)
    total += n.key.heap_bytes();
  for (const Cell& c : cells_)
    total += c.ids.heap_bytes();
  return total;
}

}  // namespace mainstem
