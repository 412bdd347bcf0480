// Views: read-only descriptions of the tree.
#include <algorithm>
#include <iterator>
#include <tuple>

#include "tree/views.h"

namespace mainstem {

namespace {

Ids ids_of(const Cell& cell) {
  return {cell.ids.data(), cell.ids.data() + cell.ids.size()};
}

}  // namespace

NodeStats TreeView::stats(Index node) const {
  const Node& n = nodes_[node];
  return {nodes_.handle(node), n.created, n.accessed, n.hits, n.start, n.pages, n.priority};
}

std::vector<Handle> TreeView::lacking(Handle handle_, std::uint32_t from, std::uint32_t to, std::uint32_t hits) const {
  cells_.require_tier(from);
  cells_.require_tier(to);
  std::vector<Index> path;
  const Index node = nodes_.resolve(handle_);
  if (nodes_[node].removed) return {};  // removed nodes are not worth a copy
  for (Index at = node; !nodes_[at].root(); at = nodes_[at].parent)
    path.push_back(at);
  std::vector<Handle> found;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    bool lacks = false, gap = false;
    for (std::uint32_t c = 0; c < cells_.components(); ++c) {
      const bool missing = cells_.cell(*at, cells_.column_of(c, to)).absent();
      const bool present = cells_.cell(*at, cells_.column_of(c, from)).present();
      lacks = lacks || (missing && present);
      gap = gap || (missing && !present && cells_.rows[c].leaf_only());
    }
    if (gap || (lacks && nodes_[*at].hits < hits)) break;
    if (lacks) found.push_back(nodes_.handle(*at));
  }
  return found;
}

Handle TreeView::in_flight_above(Handle node, std::uint32_t tier) const {
  cells_.require_tier(tier);
  Index at = nodes_.resolve(node);
  while (!nodes_[at].root()) {
    at = nodes_[at].parent;
    const Cell& above = cells_.cell(at, cells_.column_of(0, tier));
    if (above.in_flight()) return nodes_.handle(above.transfer);
  }
  return 0;
}

std::vector<Handle> TreeView::hottest(std::uint32_t tier) const {
  cells_.require_tier(tier);
  std::vector<Index> found;
  for (Index node = 1; node < nodes_.nodes().size(); ++node)
    if (nodes_[node].live && !nodes_[node].root() && !nodes_[node].removed &&
        cells_.cell(node, cells_.column_of(0, tier)).present())
      found.push_back(node);
  std::sort(found.begin(), found.end(), [&](Index a, Index b) {
    const Node &one = nodes_[a], &two = nodes_[b];
    return std::tuple(two.hits, std::uint64_t{two.accessed}, two.end(), a) <
           std::tuple(one.hits, std::uint64_t{one.accessed}, one.end(), b);
  });
  std::vector<Handle> handles;
  for (const Index node : found)
    handles.push_back(nodes_.handle(node));
  return handles;
}

Ids TreeView::own_ids(Handle node, std::uint32_t component, std::uint32_t tier) const {
  const Cell& c = cell(node, component, tier);
  return c.present() ? ids_of(c) : Ids{};
}

std::vector<PathSpan> TreeView::hot_spans(std::uint32_t tier) const {
  std::vector<PathSpan> spans;
  std::vector<std::int64_t> number(nodes_.nodes().size(), -1);  // index of the span that a node is in
  for (const Handle hot : hottest(tier)) {
    const Index node = nodes_.resolve(hot);
    Index above = node;
    while (number[above] < 0 && !nodes_[above].root())
      above = nodes_[above].parent;
    if (above == node) continue;
    const auto mine = static_cast<std::int64_t>(spans.size());
    const std::uint32_t at = nodes_[above].root() ? 0 : nodes_[above].end();
    PathSpan& span = spans.emplace_back(PathSpan{number[above], at, {}, nodes_.symbols(node, at)});
    if (number[above] < 0) {
      span.ns = text(nodes_[above].key);
      number[above] = mine;
    }
    for (Index on = node; number[on] < 0; on = nodes_[on].parent)
      number[on] = mine;
  }
  return spans;
}

std::pair<std::string, std::string> TreeView::path_key(Handle handle_, std::uint32_t begin) const {
  const Index node = nodes_.resolve(handle_);
  if (node == kNone) return {};
  return {std::string(text(nodes_[nodes_.root_of(node)].key)),
          nodes_.symbols(node, std::min(begin, nodes_[node].end()))};
}

void TreeView::copy_ids(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin,
                        std::int32_t* out) const {
  cells_.copy_ids(nodes_.resolve(node), cells_.find_column(component, tier), begin, out);
}

std::optional<NodeStats> TreeView::waiting(std::uint32_t component, std::uint32_t tier) const {
  const Index node = eviction_.unranked(cells_.find_column(component, tier));
  return node == kNone ? std::nullopt : std::optional(stats(node));
}

TreeStats TreeView::stats() const {
  const CellCounts pages = counts(0, kDevice);
  TreeStats stats{counters_};
  stats.cached_pages = pages.present;
  stats.locked_pages = pages.locked;
  stats.evictable_pages = pages.present - pages.locked;
  stats.in_flight_pages = pages.in_flight;
  stats.nodes = nodes_.size();
  stats.namespaces = nodes_.roots();
  if (const Expected* expected = eviction_.expected()) {
    stats.advice_won = expected->ledger.won();
    stats.advice_lost = expected->ledger.lost();
  }
  return stats;
}

std::vector<std::string> TreeView::namespaces() const {
  std::vector<std::string> names;
  for (Index node = 1; node < nodes_.nodes().size(); ++node)
    if (nodes_[node].live && nodes_[node].root()) names.emplace_back(text(nodes_[node].key));
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::int64_t> TreeView::survey(std::size_t first, std::size_t count) const {
  std::vector<std::int64_t> rows;
  const std::size_t last = first + std::min(count, places() - std::min(first, places()));
  const auto presence = [&](Index node, std::uint32_t tier) {
    return tier < cells_.tiers ? static_cast<int>(cells_.cell(node, cells_.column_of(0, tier)).presence()) : 0;
  };
  for (std::size_t place = std::max<std::size_t>(first, 1); place < last; ++place) {
    const auto node = static_cast<Index>(place);
    const Node& n = nodes_[node];
    if (!n.live) continue;
    const std::size_t column = cells_.column_of(0, kDevice);
    const bool retained = cells_.retained(node, column);
    const int flags = (n.removed ? 1 : 0) | (n.demoted ? 2 : 0) | (retained ? 4 : 0);
    const std::int64_t row[] = {static_cast<std::int64_t>(place),
                                n.parent,
                                static_cast<std::int64_t>(nodes_.handle(node)),
                                n.start,
                                n.pages,
                                n.hits,
                                static_cast<std::int64_t>(std::uint64_t{n.accessed}),
                                static_cast<std::int64_t>(std::uint64_t{n.created}),
                                presence(node, 0),
                                presence(node, 1),
                                cells_.cell(node, column).locks,
                                flags};
    static_assert(std::size(row) == kSurveyed);
    rows.insert(rows.end(), std::begin(row), std::end(row));
  }
  return rows;
}

std::string TreeView::name_at(std::size_t place) const {
  if (place == 0 || place >= places()) return {};
  const Node& n = nodes_[static_cast<Index>(place)];
  return n.live && n.root() ? std::string(text(n.key)) : std::string();
}

NodeView TreeView::view(Index node) const {
  const Node& n = nodes_[node];
  NodeView view{stats(node), nodes_.handle(n.parent), n.children(), n.removed != 0, {}, {}};
  view.key = text(n.key);
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    const Cell& c = cells_.cell(node, column);
    view.cells.push_back({c.presence(), c.locks, ids_of(c)});
  }
  return view;
}

// Depth first, parents before children, children by age. Removed nodes come last.
std::vector<NodeView> TreeView::nodes(std::string_view ns) const {
  std::vector<NodeView> views;
  const Index root = nodes_.find_root(ns);
  const auto show = [&](Index node) {
    if (node != root) views.push_back(view(node));
    return true;
  };
  if (root == kNone) return views;
  nodes_.every_from(root, show);
  std::vector<Index> removed;  // a removed node may follow another, which starts earlier
  for (Index node = 1; node < nodes_.nodes().size(); ++node)
    if (nodes_[node].live && nodes_[node].detached && nodes_.root_of(node) == root) removed.push_back(node);
  std::sort(removed.begin(), removed.end(),
            [&](Index a, Index b) { return std::tie(nodes_[a].start, a) < std::tie(nodes_[b].start, b); });
  for (const Index node : removed)
    nodes_.every_from(node, show);
  return views;
}

std::vector<CellCounts> TreeView::owned(std::string_view ns) const {
  std::vector<CellCounts> counts(cells_.columns);
  const OwnerId owner = cells_.find_owner(ns);
  for (std::size_t column = 0; owner != kNoOwner && column < cells_.columns; ++column)
    counts[column] = cells_.owners()->counts(owner, column);
  return counts;
}

}  // namespace mainstem
