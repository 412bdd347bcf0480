// Tree: the radix tree over paged memory. It handles bytes and integers: no tokens, no tensors, no Python.
//
// Each operation is one loop over components and tiers (component.h). A cell is addressed by (node, component, tier).
// Numbered cases ("split 3", "match 2") refer to docs/design.md, section 3.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "children.h"
#include "component.h"
#include "memory.h"
#include "node.h"
#include "order.h"
#include "policy.h"

namespace mainstem {

using Handle = std::int64_t;  // generation << 32 | index; 0 is the root of any namespace
using Ids = std::vector<std::int32_t>;
using IdSpan = std::span<const std::int32_t>;
using CheckRest = std::function<void(std::size_t)>;

constexpr std::size_t kMaxComponents = 8;
constexpr std::size_t kMaxTiers = 4;

struct StaleHandle {
  Handle handle;
};
struct NotLocked {
  Handle handle;
};
struct BadValue {
  const char* name;
  std::string value;
  std::string allowed;
};
struct Corrupt {
  std::string message;
};

inline void require(bool good, const char* name, std::uint64_t value, const char* allowed) {
  if (!good) throw BadValue{name, std::to_string(value), allowed};
}

struct MatchResult {
  Handle node = 0;       // end of the match on tier 0; 0: nothing matched
  Handle host_node = 0;  // end of the match over all tiers
  std::uint32_t pages = 0;
  std::uint32_t host_pages = 0;   // further pages when every tier counts
  std::uint32_t reach_pages = 0;  // match length of the first component alone, on tier 0
  std::uint32_t pending_pages = 0;
  std::uint32_t partial = 0;  // symbols of the next page that agree
  std::int32_t partial_id = -1;
  Handle partial_node = 0;  // its first page is partial_id
};

struct PeekResult {
  std::uint32_t pages = 0;
  std::uint32_t host_pages = 0;   // further pages when every tier counts
  std::uint32_t partial = 0;      // symbols of the next page that agree
  std::uint32_t reach_pages = 0;  // match length of the first component alone, on tier 0
};

struct InsertResult {
  Handle node = 0;
  std::uint32_t pages = 0;     // how much of the key is in the tree, counted from the root
  std::uint32_t existing = 0;  // pages before the first one that was adopted
  std::uint32_t states = 0;    // a bit for each component whose state was adopted
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
  Residency residency;
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

struct CellCounts {  // in ids
  std::uint64_t present = 0, locked = 0, in_flight = 0;
};
struct Counters {
  std::uint64_t match_calls = 0, queried_symbols = 0, hit_symbols = 0, insert_calls = 0;
  std::uint64_t inserted_pages = 0, evicted_pages = 0, splits = 0;
};

class Tree {
 public:
  Tree(std::uint32_t symbol_bytes, std::uint32_t page_size, std::vector<Component> components, std::uint32_t tiers,
       std::string_view policy, std::uint64_t hash_seed, double symbol_tokens = 1,
       std::uint32_t protected_hits = kSlruProtectedHits);
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  // Calls `check_rest` before anything changes, with the number of symbols that the tree has: those were valid when
  // they were stored. It may throw.
  MatchResult match(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {});
  PeekResult peek(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {}) const;

  // Inserts after the root of a namespace, or after a node (the namespace is then ignored). The caller ensures that the
  // node is on the path of the whole key; see `lies_on`. With `to_be_locked` nodes are split so that a lock at the end
  // needs no memory. The insertion stops before pages in flight, or continues past them with `past_flights`: no match
  // gets there before they are present.
  InsertResult insert(std::string_view ns, Handle after, Tail tail, std::int32_t priority, std::uint32_t tier,
                      bool ready, bool to_be_locked = false, bool past_flights = false);
  // Returns the node that ends after the first `pages` pages of a key, and splits one if needed; 0 if they are absent.
  Handle locate(std::string_view ns, Bytes key, std::uint32_t pages);
  bool knows(std::string_view ns, Handle after, Bytes key) const;  // has the first page of a tail
  bool lies_on(std::string_view ns, Bytes key, Handle node) const;

  // Refreshes the recency of a locked prefix that was in use until now. This does not count as a hit, and policies that
  // remember are not notified.
  void refresh_use(Handle node, std::uint32_t tier);
  // Prefixes part at the end of this node: values its window like one where a match ended.
  void keep_window(Handle node, std::uint32_t tier);
  void lock(Handle node, std::uint32_t tier);
  void unlock(Handle node, std::uint32_t tier);
  void move_lock(Handle from, Handle to, std::uint32_t tier);  // `to` is `from` or below it
  void attach(Handle node, std::uint32_t component, std::uint32_t tier, IdSpan ids, bool ready);
  void commit(Handle node, std::uint32_t tier);
  // Also removes nodes inserted after it; their ids are freed when they are evicted or their own transfer ends.
  std::vector<Ids> cancel(Handle node, std::uint32_t tier);                                // by component
  std::vector<Ids> evict(std::uint64_t ids, std::uint32_t component, std::uint32_t tier);  // by component
  // Removes the page that a key ends in, and everything after it: no match finds them any more, on any tier. An empty
  // key removes the whole namespace. A node that is locked or in flight stays until it is released; then it is evicted
  // first. Returns the number of pages removed.
  std::uint64_t remove(std::string_view ns, Bytes key);
  std::vector<Ids> evict_removed(std::uint32_t tier);  // all removed nodes that can be evicted now, as by evict()
  bool removed(Handle node) const;
  // Evicts the last pages of the first component of one candidate, whatever its rank. The policy does not take this as
  // a sign of the capacity.
  Ids drop(Handle node, std::uint64_t pages, std::uint32_t tier);
  // Evicts states above a node, those that save the least first, until the path holds at most `limit`, the node's own
  // included. Locked states and states that other sequences share stay, so the limit is soft where prompts part.
  Ids thin(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t limit);

  // Policy "external": finds a candidate without a rank, if there is one; sets its rank.
  bool waiting(std::uint32_t component, std::uint32_t tier, NodeStats* out) const;
  void rank(Handle node, std::uint32_t component, std::uint32_t tier, Rank rank);

  std::uint32_t end(Handle node) const;
  std::uint32_t start(Handle node) const;
  Handle parent(Handle node) const;  // 0: the root
  // Returns, from the top, the nodes on the path to `node` that hold something on tier `from` that tier `to` lacks.
  // Stops where `to` would get a gap, or at such a node with fewer than `hits` hits.
  std::vector<Handle> lacking(Handle node, std::uint32_t from, std::uint32_t to, std::uint32_t hits) const;
  // The node that names the transfer of the nearest in-flight pages of the first component above a node; 0: none.
  Handle in_flight_above(Handle node, std::uint32_t tier) const;
  Residency residency(Handle node, std::uint32_t component, std::uint32_t tier) const;
  // Nodes present on a tier: most hits first, then most recently used, then latest end.
  std::vector<Handle> hottest(std::size_t limit, std::uint32_t tier) const;
  Ids own_ids(Handle node, std::uint32_t component, std::uint32_t tier) const;  // the node's own, where present
  // The node that evict() takes first, or 0. The policy gives the second chances that come before it.
  Handle next_victim(std::uint32_t component, std::uint32_t tier);
  // Everything present on a tier, each page once, in the order of `hottest`; the pages above a node come with it.
  std::vector<PathSpan> hot_spans(std::uint32_t tier) const;
  // The name of the node's namespace, and the symbols from page `begin` to the node's end.
  std::pair<std::string, std::string> path_key(Handle node, std::uint32_t begin = 0) const;
  // Whether pages [begin, end of the node) of a component, or the state at its end, are all present on a tier.
  bool has(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin) const;
  // Ids of pages [begin, end of the node); -1 where they are absent.
  void copy_ids(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t begin, std::int32_t* out) const;
  std::vector<std::string> namespaces() const;
  std::vector<NodeView> nodes(std::string_view ns) const;
  void check() const;

  const Counters& counters() const { return counters_; }
  CellCounts counts(std::uint32_t component, std::uint32_t tier) const;
  std::size_t size() const { return table_.size() - roots_; }
  std::size_t namespace_count() const { return roots_; }
  std::size_t bytes() const;

  std::uint32_t symbol_bytes() const { return symbol_bytes_; }
  std::uint32_t page_size() const { return page_size_; }
  std::uint32_t page_bytes() const { return page_bytes_; }
  std::uint32_t tiers() const { return tiers_; }
  const std::vector<Component>& rows() const { return rows_; }
  bool one_id_a_page(std::size_t component) const { return component < rows_.size() && rows_[component].per_page(); }
  bool ranks_itself() const { return policy_.rank != nullptr; }

 private:
  friend struct Probe;  // benchmarks read the memory directly

  struct Step {  // one node of a walk, and how many of its pages agree
    Index node;
    std::uint32_t pages;
  };

  struct Inside {
    Index node = kNone;
    std::uint32_t symbols = 0;
  };
  struct Reach {  // in pages
    std::array<std::uint32_t, kMaxTiers> best{};
    std::uint32_t first = 0;  // the first component alone, on tier 0
    std::uint32_t pending = 0;
  };

  struct Fill {  // ids for an absent cell
    Index node;
    std::uint32_t component;
    Run<std::int32_t> ids;
  };
  struct Piece {  // a future node
    std::uint32_t end = 0;
    Index node = kNone;
    Run<std::uint8_t> key;
    std::array<Run<std::int32_t>, kMaxComponents> ids;  // empty: absent
  };

  // addresses
  std::size_t slot(std::uint32_t component, std::uint32_t tier) const { return component * tiers_ + tier; }
  const Component& row(std::size_t slot) const { return row_of_slot_[slot]; }
  Cell& cell(Index node, std::size_t slot) { return cells_[std::size_t{node} * slots_ + slot]; }
  const Cell& cell(Index node, std::size_t slot) const { return cells_[std::size_t{node} * slots_ + slot]; }
  std::uint32_t& pins(Index node, std::uint32_t tier) { return pins_[std::size_t{node} * tiers_ + tier]; }
  std::uint32_t pins(Index node, std::uint32_t tier) const { return pins_[std::size_t{node} * tiers_ + tier]; }
  // The pins that lock() took. The others hold the node for its detached children; see detach().
  std::uint32_t locks_taken(Index node, std::uint32_t tier) const {
    const auto found = tier || above_removed_.empty() ? above_removed_.end() : above_removed_.find(node);
    return pins(node, tier) - (found == above_removed_.end() ? 0 : found->second);
  }
  std::string symbols(Index node, std::uint32_t begin) const;  // of pages [begin, end of the node)
  Handle handle(Index node) const;
  Index resolve(Handle handle) const;  // kNone for 0
  Index find_root(std::string_view ns) const;
  Step step_down(Index parent, const std::uint8_t* page, std::uint32_t pages) const;
  std::uint32_t hash(Index parent, const std::uint8_t* page) const;
  std::uint32_t hash(std::string_view ns) const;
  std::uint32_t common_pages(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t pages) const;

  // structure
  void reserve_nodes(std::size_t count);
  Index new_node();
  void free_node(Index node);
  Index make_root(std::string_view ns);
  Index add_child(Index parent, Run<std::uint8_t>&& key, std::int32_t priority);
  Index split(Index node, std::uint32_t pages);
  void join(Index lower) noexcept;
  bool joins(Index upper, Index lower) const;
  void release_boundary(Index node);
  void join_after(Index node, std::size_t slot);
  void take_place(Index node, Index of);
  void link(Index parent, Index node);
  void unlink(Index node);
  void note_fork(Index parent);
  void reap(Index node);
  bool dead(Index node) const;
  bool empty(Index node) const;
  bool empty_of(Index node, std::size_t component) const;
  bool has_no_pages(Index node) const;
  // Calls `each` for a node and its descendants, depth first, until it returns false. Returns whether it never did.
  template <class Each>
  bool every_from(Index top, Each each) const {
    for (Index at = top; at != kNone;) {
      if (!each(at)) return false;
      if (nodes_[at].first_child != kNone) {
        at = nodes_[at].first_child;
        continue;
      }
      while (at != top && nodes_[at].next == kNone)
        at = nodes_[at].parent;
      at = at == top ? kNone : nodes_[at].next;
    }
    return true;
  }
  void prepare_to_detach(Index node);
  std::uint64_t detach(Index node) noexcept;
  void unpin_parent(Index node);
  std::vector<Index> children_like(Index parent, Bytes tail) const;

  // cells
  void occupy(Index node, std::size_t slot, Run<std::int32_t>&& ids, Index transfer);
  Run<std::int32_t> vacate(Index node, std::size_t slot);
  void settle(Index node, std::size_t slot);
  void change_locks(Index node, std::size_t slot, int by);
  void lock_path(Index node, Index stop, std::size_t slot, int by);
  void lock_all(Index node, std::uint32_t tier, int by);
  void split_at(Index node, std::uint32_t page);
  void split_at_window(Index node, std::size_t slot);
  void refresh(Index node, std::size_t slot);
  bool candidate(Index node, std::size_t slot) const;
  Rank rank_of(Index node, std::size_t slot) const;
  Rank rank_by_standing(Index node, std::size_t slot) const;
  void note_standing(Index node, std::size_t slot);
  Place place_of(Index node, std::size_t slot) const;
  Replacement* replacement(std::size_t slot) const { return remembers_ ? replacements_[slot].get() : nullptr; }
  Queues queues(std::size_t slot) const { return {const_cast<Order*>(&orders_[slot]), slots_, queue_count_}; }
  void put(Index node, std::size_t slot);
  void remove(Index node, std::size_t slot);
  void put_in_queue(Index node, std::size_t slot);
  void remove_from_queue(Index node, std::size_t slot);
  void note_came(Index node, std::size_t slot);
  void note_gone(Index node, std::uint32_t pages, std::size_t slot);
  Index victim(std::size_t slot);
  Index spare_and_choose(std::size_t slot);
  bool goes_first(Index node, std::size_t slot) const;
  std::uint64_t used(Index node, std::size_t slot) const;
  Standing& standing(Index node, std::size_t slot) { return standings_[std::size_t{node} * slots_ + slot]; }
  const Standing& standing(Index node, std::size_t slot) const { return standings_[std::size_t{node} * slots_ + slot]; }
  void credit(Index node, std::size_t slot);
  void supersede_above(Index node, std::size_t slot);
  void note_end(Index node, std::size_t slot, double worth);
  void end_window(Index node, std::size_t slot, double worth);
  void pass_window(Index node, std::size_t slot);
  std::uint32_t saved_pages(Index node, std::size_t slot) const;
  void touch(Index node, std::uint64_t tick);

  // operations in parts
  void walk(Index root, Bytes key, std::uint32_t pages, std::vector<Step>* path, const CheckRest& check_rest) const;
  Reach judge(const std::vector<Step>& path) const;
  Index cut(std::vector<Step>* path, std::uint32_t pages);
  static std::uint64_t root_name(std::string_view ns) {
    return Identity::mix(reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
  }
  void note_uses(std::uint64_t root, Bytes key);
  bool parts_from_another(std::uint32_t pages) const;
  std::uint32_t agreement(Index node, std::uint32_t page, Bytes tail) const;
  Inside look_inside(Index node, Bytes tail) const;
  bool divides_pages() const;  // whether a match may end inside a page
  std::uint32_t whole_pages(Bytes key) const;
  void require_tier(std::uint32_t tier) const;
  void require_component(std::uint32_t component) const;
  void check_tail(const Tail& tail, std::uint32_t pages) const;
  std::pair<Index, bool> descend(Index node, const Tail& tail, std::uint32_t tier, std::int32_t priority, bool ready,
                                 bool past_flights);
  void note_fills(Index node, Index top, const Tail& tail, std::uint32_t tier, std::vector<Fill>* fills) const;
  void cut_pieces(Index node, std::uint32_t begin, const Tail& tail, std::uint32_t tier, bool locked,
                  std::vector<Piece>* pieces) const;
  Index append_pieces(Index node, std::vector<Piece>* pieces, std::uint32_t tier, std::int32_t priority, bool ready);
  void renew(Index node, std::int32_t priority);
  bool blocked(Index node, const Tail& tail, std::uint32_t page, std::uint32_t tier, bool ready,
               bool past_flights) const;
  void reserve_freed(Index node, std::vector<Ids>* freed) const;
  void take_cell(Index node, std::size_t slot, Ids* freed);
  void trim(Index node, std::uint32_t pages, std::uint32_t tier, std::vector<Ids>* freed);
  void evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier, std::vector<Ids>* freed);
  bool only_on(Index node, std::uint32_t tier) const;
  bool subtree_only_on(Index node, std::uint32_t tier) const;
  std::vector<Index> inserted_after(Index node, std::uint32_t tier) const;
  std::uint32_t dispensable(Index node, std::size_t slot) const;
  NodeStats stats(Index node) const;
  NodeView view(Index node) const;
  Index root_of(Index node) const;

  void check_free() const;
  void check_node(Index node) const;
  void check_cells(Index node) const;
  void check_name(Index node) const;
  void check_locks() const;
  void check_counts() const;
  void check_pages() const;
  [[noreturn]] void broken(Index node, const std::string& rule) const;

  const std::uint32_t symbol_bytes_, page_size_, page_bytes_, tiers_;
  const std::vector<Component> rows_;
  const std::size_t slots_;  // cells a node
  std::vector<Component> row_of_slot_;
  const bool single_cell_;    // full attention on one tier: a node has one cell, and only leaves have a rank
  const bool has_standings_;  // there are windows or states
  const Policy policy_;
  const std::uint32_t protected_hits_;  // for slru
  const bool remembers_;                // the policy has objects of its own
  const std::uint64_t seed_;

  Array<Node> nodes_;
  Array<Cell> cells_;
  Array<std::uint32_t> pins_;      // locks that end at this node, by tier
  Array<Standing> standings_;      // like cells_, if a component has an order of its own: see credit() and end_window()
  std::vector<double> inflation_;  // by slot: the worth of the last evicted state
  Array<std::uint64_t> names_;     // by node, if the policy remembers: the identity of its last page
  std::unordered_map<Index, std::uint32_t> above_removed_;  // nodes with detached children, and how many
  Index free_ = kNone;                                      // the first of the free nodes, linked by `next`
  std::size_t free_count_ = 0;
  std::size_t room_ = 0;  // nodes for which every array has memory
  ChildTable table_;
  std::size_t roots_ = 0;      // nodes in the table that are roots
  std::vector<Order> orders_;  // by queue, then by slot
  std::uint32_t queue_count_ = 1;
  std::vector<std::unique_ptr<Replacement>> replacements_;  // by slot; null: ranks
  std::vector<CellCounts> counts_;
  Counters counters_;
  std::uint64_t tick_ = 0;
  std::vector<Step> path_;  // scratch, kept between calls for its memory
  std::vector<Piece> pieces_;
  std::vector<Run<std::int32_t>::Room> rooms_;  // by slot, for ids about to be cut or joined
};

}  // namespace mainstem
