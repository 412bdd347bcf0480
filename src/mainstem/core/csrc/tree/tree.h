// Tree: the radix tree over paged memory. It knows bytes and integers: no tokens, no tensors, no Python. Its operations
// stand in one file each: match, insert, lock, transfer, evict, remove; views.cpp describes the tree, check.cpp
// verifies it.
//
// Each operation is one loop over components and tiers (residency/component.h).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
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
struct MatchResult : PeekResult {
  Handle node = 0;       // end of the match on tier 0; 0: nothing matched
  Handle host_node = 0;  // end of the match over all tiers
  std::uint32_t pending_pages = 0;
  std::int32_t partial_id = -1;
  Handle partial_node = 0;  // its first page is partial_id
};

struct InsertResult {
  Handle node = 0;
  std::uint32_t pages = 0;     // how much of the key is in the tree, counted from the root
  std::uint32_t existing = 0;  // pages before the first one that was adopted
  std::uint32_t states = 0;    // a bit for each component whose state was adopted
};

// What a retention keeps. `node`: its end; 0: nothing.
struct Retained {
  Handle node = 0;
  std::uint32_t pages = 0;
  IdCounts alone{};  // ids by component that no other retention keeps on this tier
};

// What to insert after a node: whole pages of symbols, and each component's ids for them. A component with one id per
// page has an id for each page; leading -1 ids of a window component stand for pages before the window.
struct Tail {
  Bytes key;
  std::span<const IdSpan> ids;
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

// Why pages are not used by a match, or where they are.
enum class Cause : std::uint8_t {
  device,
  host,
  never_seen,
  parted,
  departed,
  forgotten,
  in_flight,
  window_missing,
  state_missing,
  partial_page
};

inline constexpr const char* kCauseNames[] = {"device",        "host",        "never_seen", "parted",
                                              "departed",      "forgotten",   "in_flight",  "window_missing",
                                              "state_missing", "partial_page"};

// Consecutive pages of a prompt, with one cause.
struct Explained {
  std::uint32_t begin, end;  // in pages
  Cause cause;
  std::uint64_t number = 0;    // of the ghost
  Departure departure{};       // for Cause::departed
  std::int64_t distance = -1;  // its stack distance in pages; -1: not asked for, or not known
  std::int64_t used = -1;      // of what is found: the tick of the last use of its last page; -1: not known
};

struct Explanation {
  std::vector<Explained> runs;
  std::uint32_t parted = 0;  // symbols of the first page of the last run that agree with the nearest key
  std::string other;         // how that key goes on from there
  std::uint64_t horizon = 0, tick = 0;
};

// A span of pages of one path. It continues an earlier span: it starts after page `at` of the path that ends with the
// span `from`. The first span of a namespace continues none (-1) and holds the name of the namespace.
struct PathSpan {
  std::int64_t from;
  std::uint32_t at;
  std::string ns, symbols;
};

// What a tree holds now, beside what it has counted.
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

class Tree : private TreeShape {
 public:
  using TreeShape::TreeShape;

  // Calls `check_rest` before anything changes, with the number of symbols that the tree has: those were valid when
  // they were stored. It may throw.
  MatchResult match(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {});
  PeekResult peek(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {}) const;
  // The symbols after a key, at most `most`, of the sequence used last among those that begin with the key; whether or
  // not any tier still has their pages. Of nodes that part inside a page, only the youngest are looked at.
  std::string continuation(std::string_view ns, Bytes key, std::size_t most) const;

  // From now on, what is evicted or removed is remembered, so many pages of it. The tree must be empty.
  void remember(std::size_t pages) {
    require(nodes_.size() == 0, "nodes", nodes_.size(), "none: a memory begins with an empty tree");
    auto ghosts = std::make_unique<Ghosts>(nodes_, seed_, pages);
    ghosts->reserve(nodes_.nodes().capacity());
    ghosts_ = std::move(ghosts);
  }
  // Where the pages of a key are, and why the others are nowhere. Changes nothing that another call shows. `distances`:
  // also the stack distances of what was evicted, for which every node is visited.
  Explanation explain(std::string_view ns, Bytes key, bool distances);
  std::uint64_t tick() const { return eviction_.tick(); }
  bool tells_recency() const { return eviction_.tells_recency(); }

  // Inserts after the root of a namespace, or after a node (the namespace is then ignored). The caller ensures that the
  // node is on the path of the whole key; see `lies_on`. With `to_be_locked` nodes are split so that a lock at the end
  // needs no memory. The insertion stops before pages in flight, or continues past them with `past_flights`: no match
  // gets there before they are present.
  InsertResult insert(std::string_view ns, Handle after, Tail tail, std::int32_t priority, std::uint32_t tier,
                      bool ready, bool to_be_locked = false, bool past_flights = false);
  // Returns the node that ends after the first `pages` pages of a key, and splits one if needed; 0 if they are absent.
  Handle locate(std::string_view ns, Bytes key, std::uint32_t pages);
  // How many pages of a key can be continued with pages of other components: those that some tier has of the first
  // component, or where that may begin late, those that have nodes.
  std::uint32_t extent(std::string_view ns, Bytes key) const;
  bool knows(std::string_view ns, Handle after, Bytes key) const;  // has the first page of a tail
  bool lies_on(std::string_view ns, Bytes key, Handle node) const {
    return nodes_.lies_on(ns, key, nodes_.resolve(node));
  }

  // Refreshes the recency of a locked prefix that was in use until now. This does not count as a hit, and policies that
  // remember are not notified.
  void refresh_use(Handle node, std::uint32_t tier);
  // Prefixes part at the end of this node: values its window like one where a match ended.
  void keep_window(Handle node, std::uint32_t tier);
  // Other prefixes will part here: the state here is treated as if they had.
  void expect_fork(Handle node);
  void lock(Handle node, std::uint32_t tier);
  void unlock(Handle node, std::uint32_t tier);
  void move_lock(Handle from, Handle to, std::uint32_t tier);  // `to` is `from` or below it

  // Retains, on a tier, the longest prefix of a key that it has without the others and that `room` is enough for: how
  // many ids of each component may be kept that no retention keeps so far. A retained prefix is locked until
  // end_retention(), and counted apart from other locks.
  Retained retain(std::string_view ns, Bytes key, std::uint32_t tier, const IdCounts& room);
  // The same for exactly the prefix that ends at a node, or nothing.
  Retained retain(Handle node, std::uint32_t tier, const IdCounts& room);
  IdCounts end_retention(Handle node, std::uint32_t tier);  // the ids that no other one keeps
  // What begins with a key, and of the key what no other sequence has, is evicted first on the first `tiers` tiers,
  // until it is used again. Returns its nodes; none where the tree has less of the key and others go on from there.
  std::vector<Handle> demote(std::string_view ns, Bytes key, std::uint32_t tiers);
  // The sequence that begins with a key, as far as the tree has it, is expected to be used next at `due`, by a clock
  // that never goes back; the latest advice counts, until it is used. `account`: who says so, and answers for it.
  // Returns the pages of the key that are there.
  std::uint32_t expect(std::string_view ns, Bytes key, Account account, double now, double due);
  void tell_time(double now) { eviction_.tell_time(now); }
  // The nodes along a key, from the top, as far as the tree has whole ones.
  std::vector<Handle> path(std::string_view ns, Bytes key) const;

  // Gives owners of namespaces their shares: those with a name in `named`, and each other one. A namespace without a
  // tenant, a salt or a name has none unless it is among them, as "". What exceeds a maximum now goes first.
  void share_out(Shares others, const std::map<std::string, Shares>& named);
  bool has_shares() const { return cells_.owners() != nullptr; }
  std::string owner(Handle node) const {
    return std::string(owner_of(text(nodes_[nodes_.root_of(nodes_.resolve(node))].key)));
  }
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

  void attach(Handle node, std::uint32_t component, std::uint32_t tier, IdSpan ids, bool ready);
  void commit(Handle node, std::uint32_t tier);
  // Also removes what was inserted after them; its ids are freed when it is evicted or its own transfer ends.
  std::vector<Ids> cancel(Handle node, std::uint32_t tier);  // by component
  // Evicts at most so many ids of a component, and returns ids by component. With shares, room is made for the owner of
  // a namespace, see Eviction::victim; without one, whatever the shares are.
  std::vector<Ids> evict(std::uint64_t ids, std::uint32_t component, std::uint32_t tier,
                         std::optional<std::string_view> ns = std::string_view{});
  // Removes the page that a key ends in, and everything after it: no match finds them any more, on any tier. An empty
  // key removes the whole namespace. A node that is locked or in flight stays until it is released; then it is evicted
  // first. Returns the number of pages removed.
  std::uint64_t remove(std::string_view ns, Bytes key);
  std::vector<Ids> evict_removed(std::uint32_t tier);  // all removed nodes that can be evicted now, as by evict()
  bool removed(Handle node) const { return nodes_[nodes_.resolve(node)].removed; }
  // Whether a sequence ends at this node, or others part there.
  bool ends_or_parts(Handle node) const {
    const Node& n = nodes_[nodes_.resolve(node)];
    return n.forked || n.children() != 1;
  }
  // Evicts the last pages of the first component of one candidate, whatever its rank. The policy does not take this as
  // a sign of the capacity.
  Ids drop(Handle node, std::uint64_t pages, std::uint32_t tier);
  // Evicts states above a node, those that save the least first, until the path holds at most `limit`, the node's own
  // included. Locked states and states that other sequences share stay, so the limit is soft where prompts part.
  Ids thin(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t limit);

  // Policy "external": finds a candidate without a rank, if there is one; sets its rank.
  bool waiting(std::uint32_t component, std::uint32_t tier, NodeStats* out) const;
  void rank(Handle node, std::uint32_t component, std::uint32_t tier, Rank rank) {
    eviction_.rank(nodes_.resolve(node), cells_.find_column(component, tier), rank);
  }

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
  // Nodes present on a tier: most hits first, then most recently used, then latest end.
  std::vector<Handle> hottest(std::uint32_t tier) const;
  Ids own_ids(Handle node, std::uint32_t component, std::uint32_t tier) const;  // the node's own, where present
  // The node that evict() takes first, or 0.
  Handle next_victim(std::uint32_t component, std::uint32_t tier, std::uint64_t want = 1, std::string_view ns = {}) {
    return nodes_.handle(eviction_.victim(cells_.find_column(component, tier), cells_.find_owner(ns), want));
  }
  // Everything present on a tier, each page once, in the order of `hottest`; the pages above a node come with it.
  std::vector<PathSpan> hot_spans(std::uint32_t tier) const;
  // The name of the node's namespace, and the symbols from page `begin` to the node's end.
  std::pair<std::string, std::string> path_key(Handle node, std::uint32_t begin = 0) const;
  // Whether pages [begin, end of the node) of a component, or the state at its end, are all present on a tier.
  bool has(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin) const {
    return cells_.has(nodes_.resolve(node), cells_.find_column(component, tier), begin);
  }
  // Ids of pages [begin, end of the node); -1 where they are absent.
  void copy_ids(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin, std::int32_t* out) const;
  std::vector<std::string> namespaces() const;
  std::vector<NodeView> nodes(std::string_view ns) const;
  // The numbers of the live nodes among `count` places from `first` on, kSurveyed of them each; roots are nodes here,
  // of no pages. Its work is bounded by `count`, so a large tree can be read in slices.
  std::vector<std::int64_t> survey(std::size_t first, std::size_t count) const;
  std::size_t places() const { return nodes_.nodes().size(); }  // which nodes have or had; 0 is nobody's
  static constexpr std::size_t kSurveyed = 12;
  std::string name_at(std::size_t place) const;  // of the namespace whose root is there; "" if none is
  void check() const;

  // Notes from now on which pages come to a tier and leave it; see Journal. The tree must be empty, and its ids of the
  // first component stay below `places`, by tier.
  void listen(std::string_view key, const std::vector<std::uint32_t>& places, std::size_t limit) {
    journal_ = std::make_unique<Journal>(nodes_, cells_, key, places, limit);
  }
  // Before ids that a caller passes are inserted.
  void require_place(std::uint32_t component, std::uint32_t tier, IdSpan ids) const {
    if (journal_ && component == 0 && tier < tiers()) journal_->require_place(tier, ids);
  }
  // Nothing if nobody listens.
  void note_written(Handle node, std::uint32_t begin) {
    if (journal_) journal_->written(nodes_.resolve(node), begin);
  }
  void note_deleted(Handle node) {
    if (journal_) journal_->deleted(nodes_.resolve(node));
  }
  Journal& journal() {
    require(journal_ != nullptr, "journal", 0, "one: listen() comes first");
    return *journal_;
  }

  TreeStats stats() const;
  CellCounts counts(std::uint32_t component, std::uint32_t tier) const {
    return cells_.counts(cells_.find_column(component, tier));
  }
  std::size_t size() const { return nodes_.size(); }
  std::size_t bytes() const {
    return nodes_.bytes() + cells_.bytes() + eviction_.bytes() + (ghosts_ ? ghosts_->bytes() : 0);
  }

  std::uint32_t symbol_bytes() const { return nodes_.symbol_bytes; }
  std::uint32_t page_size() const { return nodes_.page_size; }
  std::uint32_t page_bytes() const { return nodes_.page_bytes; }
  std::uint32_t tiers() const { return cells_.tiers; }
  const std::vector<Component>& rows() const { return cells_.rows; }
  bool one_id_a_page(std::size_t component) const {
    return component < cells_.rows.size() && cells_.rows[component].per_page();
  }

 private:
  friend struct Probe;  // benchmarks and tests look at the memory itself

  struct Inside {
    Index node = kNone;
    std::uint32_t symbols = 0;
  };
  struct Piece {  // a node to be added
    std::uint32_t end = 0;
    Index node = kNone;
    Structure::Key key;
    std::array<Run<std::int32_t>, kMaxComponents> ids;  // empty: absent
  };
  struct Insertion;

  const Cell& cell(Handle node, std::uint32_t component, std::uint32_t tier) const {
    return cells_.cell(nodes_.resolve(node), cells_.find_column(component, tier));
  }
  Index end_at(Walk* path, std::uint32_t pages);
  bool parts_from_another(std::uint32_t pages) const;
  std::uint32_t agreement(Index node, std::uint32_t page, Bytes tail) const;
  Inside look_inside(Index node, Bytes tail) const;
  Index child_used_last(Index node, Bytes tail) const;
  bool divides_pages() const { return cells_.rows.size() == 1 && cells_.rows[0].leaf_only(); }
  template <class Each>
  void end_transfer(Index node, std::uint32_t tier, Each each);
  std::vector<Index> inserted_after(Index node, std::uint32_t tier) const;
  Why reason(Index node, std::size_t column, OwnerId owner, std::uint64_t want) const;
  Cause cause_here(Index node, Cause missing) const;
  Cause missing(const Walk& path) const;
  std::int64_t last_use(const Walk& path, std::uint32_t pages) const;
  void explain_gone(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from, Explanation* to);
  void explain_parting(Index root, const Walk& path, Bytes key, Explanation* to) const;
  void measure(Explanation* of);
  void reserve_freed(Index node, std::vector<Ids>* freed) const;
  void trim(Index node, std::uint32_t pages, std::uint32_t tier, std::vector<Ids>* freed);
  void evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier, std::vector<Ids>* freed);
  std::uint32_t cut_to(Walk* path, std::uint32_t pages) const;
  std::pair<std::vector<Index>, Index> beginning_with(std::string_view ns, Bytes key);
  Retained retain_walk(std::uint32_t tier, const IdCounts& room, bool all);
  std::vector<Index> children_like(Index parent, Bytes tail) const;
  NodeStats stats(Index node) const;
  NodeView view(Index node) const;

  Walk path_;  // these are kept between calls for their memory
  std::vector<Piece> pieces_;
};

}  // namespace mainstem
