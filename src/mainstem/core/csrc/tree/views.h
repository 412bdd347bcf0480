// TreeView: what a tree shows of itself: its nodes, their ids and keys, counts. A Tree is a TreeView; code that only
// reads takes one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tree/shape.h"

namespace mainstem {

// How much of a key can be used.
struct PeekResult {
  PeekResult() = default;
  explicit PeekResult(const Reach& reach, std::uint32_t tiers)
      : pages(reach.best[kDevice]), host_pages(reach.best[tiers - 1] - pages), reach_pages(reach.first) {}

  std::uint32_t pages = 0;
  std::uint32_t host_pages = 0;   // further pages when every tier counts
  std::uint32_t reach_pages = 0;  // match length of the first component alone, on tier 0
  std::uint32_t partial = 0;      // symbols of the next page that agree
};

struct NodeStats {
  Handle node;
  std::uint64_t created, accessed;
  std::uint32_t hits, start, pages;
  std::int32_t priority;
};

struct CellView {
  Presence presence;
  std::uint32_t locks;
  Ids ids;
};
struct NodeView {
  NodeStats stats;
  Handle parent;
  std::uint32_t children;
  bool removed;
  std::string key;
  std::vector<CellView> cells;
};

// A span of pages of one path. It continues an earlier span: it starts after page `at` of the path that ends with the
// span `from`. The first span of a namespace continues none (-1) and holds the name of the namespace.
struct PathSpan {
  std::int64_t from;
  std::uint32_t at;
  std::string ns, symbols;
};

// The contents of a tree now, beside its counters.
#define MAINSTEM_TREE_STATS(COUNT)                                      \
  COUNT(cached_pages, "Pages present: locked or evictable.")            \
  COUNT(locked_pages, "Pages present that a lock protects.")            \
  COUNT(evictable_pages, "Pages present that repeated eviction frees.") \
  COUNT(in_flight_pages, "Pages whose transfer has not ended.")         \
  COUNT(nodes, "Nodes, without roots.")                                 \
  COUNT(namespaces, "Roots.")                                           \
  COUNT(advice_won, "Pages found because advice was followed.")         \
  COUNT(advice_lost, "Pages missed because advice was followed.")
MAINSTEM_COUNTERS(TreeStats, TreeCounters, MAINSTEM_TREE_STATS);

class TreeView : protected TreeShape {
 public:
  using TreeShape::TreeShape;

  // ---- along a key
  PeekResult peek(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {}) const;
  // The symbols after a key, at most `most`, of the sequence used last among those that begin with the key; whether or
  // not any tier still has their pages. Of nodes that part inside a page, only the youngest are looked at.
  std::string continuation(std::string_view ns, Bytes key, std::size_t most) const;
  // How many pages of a key can be continued with pages of other components: those that some tier has of the first
  // component, or where that may begin late, those that have nodes.
  std::uint32_t extent(std::string_view ns, Bytes key) const;
  bool knows(std::string_view ns, Handle after, Bytes key) const;  // has the first page of a tail
  bool lies_on(std::string_view ns, Bytes key, Handle node) const {
    return nodes_.lies_on(ns, key, nodes_.resolve(node));
  }
  // The nodes along a key, from the top, as far as the tree has whole ones.
  std::vector<Handle> path(std::string_view ns, Bytes key) const;

  // ---- one node
  std::uint32_t end(Handle node) const { return nodes_[nodes_.resolve(node)].end(); }
  std::uint32_t start(Handle node) const { return nodes_[nodes_.resolve(node)].start; }
  Handle parent(Handle node) const { return nodes_.handle(nodes_[nodes_.resolve(node)].parent); }  // 0: the root
  // Returns, from the top, the nodes on the path to `node` that hold something on tier `from` that tier `to` lacks.
  // Stops where `to` would get a gap, or at such a node with fewer than `hits` hits.
  std::vector<Handle> lacking(Handle node, std::uint32_t from, std::uint32_t to, std::uint32_t hits) const;
  // The node that names the transfer of the nearest in-flight pages of the first component above a node; 0: none.
  Handle in_flight_above(Handle node, std::uint32_t tier) const;
  Presence presence(Handle node, std::uint32_t component, std::uint32_t tier) const {
    return cell(node, component, tier).presence();
  }
  Ids own_ids(Handle node, std::uint32_t component, std::uint32_t tier) const;  // the node's own, where present
  bool removed(Handle node) const { return nodes_[nodes_.resolve(node)].removed; }
  // Whether a sequence ends at this node, or others part there.
  bool ends_or_parts(Handle node) const {
    const Node& n = nodes_[nodes_.resolve(node)];
    return n.forked || n.children() != 1;
  }
  // The name of the node's namespace, and the symbols from page `begin` to the node's end.
  std::pair<std::string, std::string> path_key(Handle node, std::uint32_t begin = 0) const;
  // Whether pages [begin, end of the node) of a component, or the state at its end, are all present on a tier.
  bool has(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin) const {
    return cells_.has(nodes_.resolve(node), cells_.find_column(component, tier), begin);
  }
  // Ids of pages [begin, end of the node); -1 where they are absent.
  void copy_ids(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin, std::int32_t* out) const;
  std::string owner(Handle node) const {
    return std::string(owner_of(text(nodes_[nodes_.root_of(nodes_.resolve(node))].key)));
  }

  // ---- all nodes
  // Nodes present on a tier: most hits first, then most recently used, then latest end.
  std::vector<Handle> hottest(std::uint32_t tier) const;
  // Everything present on a tier, each page once, in the order of `hottest`; the pages above a node come with it.
  std::vector<PathSpan> hot_spans(std::uint32_t tier) const;
  std::vector<std::string> namespaces() const;
  std::vector<NodeView> nodes(std::string_view ns) const;
  // The numbers of the live nodes among `count` places from `first` on, kSurveyed of them each; roots are nodes here,
  // of no pages. Its work is bounded by `count`, so a large tree can be read in slices.
  std::vector<std::int64_t> survey(std::size_t first, std::size_t count) const;
  std::size_t places() const { return nodes_.nodes().size(); }  // which nodes have or had; 0 is nobody's
  static constexpr std::size_t kSurveyed = 12;
  std::string name_at(std::size_t place) const;  // of the namespace whose root is there; "" if none is
  // Policy "external": a candidate without a rank, if there is one; Tree::rank() gives it one.
  std::optional<NodeStats> waiting(std::uint32_t component, std::uint32_t tier) const;

  // ---- owners, where they have shares
  bool has_shares() const { return cells_.owners() != nullptr; }
  // The owners that have anything, or a share of their own; what one of them has, by component and tier.
  std::vector<std::string> owners() const {
    return cells_.owners() ? cells_.owners()->names() : std::vector<std::string>{};
  }
  std::vector<CellCounts> owned(std::string_view ns) const;
  // How many ids can be evicted for the owner of a namespace; without shares, for anybody.
  std::uint64_t available(std::uint32_t component, std::uint32_t tier, std::string_view ns) const {
    return cells_.available(cells_.find_column(component, tier), cells_.find_owner(ns));
  }
  // An owner that has more than its maximum, and how many ids of that can be evicted; 0: nobody has.
  std::pair<std::string_view, std::uint64_t> beyond_maximum(std::uint32_t component, std::uint32_t tier) const {
    const std::size_t column = cells_.find_column(component, tier);
    if (!eviction_.shares()) return {};
    const auto [owner, ids] = eviction_.shares()->beyond_maximum(column);
    return {cells_.owners()->name(owner), ids};
  }

  // ---- counts
  TreeStats stats() const;
  CellCounts counts(std::uint32_t component, std::uint32_t tier) const {
    return cells_.counts(cells_.find_column(component, tier));
  }
  std::size_t size() const { return nodes_.size(); }
  std::size_t bytes() const {
    return nodes_.bytes() + cells_.bytes() + eviction_.bytes() + (ghosts_ ? ghosts_->bytes() : 0);
  }
  std::uint64_t tick() const { return eviction_.tick(); }
  bool tells_recency() const { return eviction_.tells_recency(); }

  // ---- what it was made with
  std::uint32_t symbol_bytes() const { return nodes_.symbol_bytes; }
  std::uint32_t page_size() const { return nodes_.page_size; }
  std::uint32_t page_bytes() const { return nodes_.page_bytes; }
  std::uint32_t tiers() const { return cells_.tiers; }
  const std::vector<Component>& rows() const { return cells_.rows; }
  bool one_id_a_page(std::size_t component) const {
    return component < cells_.rows.size() && cells_.rows[component].per_page();
  }

 protected:
  struct Inside {
    Index node = kNone;
    std::uint32_t symbols = 0;
  };
  std::uint32_t agreement(Index node, std::uint32_t page, Bytes tail) const;
  Inside look_inside(Index node, Bytes tail) const;
  bool divides_pages() const { return cells_.rows.size() == 1 && cells_.rows[0].leaf_only(); }
  const Cell& cell(Handle node, std::uint32_t component, std::uint32_t tier) const {
    return cells_.cell(nodes_.resolve(node), cells_.find_column(component, tier));
  }
  NodeStats stats(Index node) const;

 private:
  Index child_used_last(Index node, Bytes tail) const;
  NodeView view(Index node) const;
};

}  // namespace mainstem
