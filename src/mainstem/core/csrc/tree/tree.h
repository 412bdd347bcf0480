// Tree: the radix tree over paged memory, as others change it; views.h has what they read. It knows bytes and integers:
// no tokens, no tensors, no Python. Its operations stand in one file each: match, insert, lock, transfer, evict,
// remove, advice, explain. check.cpp verifies the tree.
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

#include "tree/views.h"

namespace mainstem {

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

// The prefix that a retention keeps. `node`: its end; 0: nothing.
struct Retained {
  Handle node = 0;
  std::uint32_t pages = 0;
  IdCounts alone{};  // ids by component that no other retention keeps on this tier
};

// The pages to insert after a node: their symbols, and each component's ids for them. A component with one id per
// page has an id for each page; leading -1 ids of a window component stand for pages before the window.
struct Tail {
  Bytes key;
  std::span<const IdSpan> ids;
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

class Tree : public TreeView {
 public:
  using TreeView::TreeView;

  // ---- keys
  // Calls `check_rest` before anything changes, with the number of symbols that the tree has: those were valid when
  // they were stored. It may throw.
  MatchResult match(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest = {});

  // From now on, what is evicted or removed is remembered, so many pages of it. The tree must be empty.
  void remember(std::size_t pages) {
    require(nodes_.size() == 0, "nodes", nodes_.size(), "none: a memory begins with an empty tree");
    auto ghosts = std::make_unique<Ghosts>(nodes_, seed_, pages);
    ghosts->reserve(nodes_.nodes().capacity());
    ghosts_ = std::move(ghosts);
  }
  // Says where each page of a key is, or why it is nowhere. Changes nothing that another call shows. `distances`: also
  // computes the stack distances of evicted pages, for which every node is visited.
  Explanation explain(std::string_view ns, Bytes key, bool distances);

  // Inserts after the root of a namespace, or after a node (the namespace is then ignored). The caller ensures that the
  // node is on the path of the whole key; see `lies_on`. With `to_be_locked` nodes are split so that a lock at the end
  // needs no memory. The insertion stops before pages in flight, or continues past them with `past_flights`: no match
  // gets there before they are present.
  InsertResult insert(std::string_view ns, Handle after, Tail tail, std::int32_t priority, std::uint32_t tier,
                      bool ready, bool to_be_locked = false, bool past_flights = false);
  // Returns the node that ends after the first `pages` pages of a key, and splits one if needed; 0 if they are absent.
  Handle locate(std::string_view ns, Bytes key, std::uint32_t pages);

  // ---- locks and uses
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

  // ---- advice
  // Retains a prefix of a key on one tier until end_retention(): the longest one of which the tier has all pages, and
  // which adds at most `room[c]` ids of component c to those that are retained already. A retained prefix is locked,
  // and counted apart from other locks.
  Retained retain(std::string_view ns, Bytes key, std::uint32_t tier, const IdCounts& room);
  // The same for exactly the prefix that ends at a node, or nothing.
  Retained retain(Handle node, std::uint32_t tier, const IdCounts& room);
  IdCounts end_retention(Handle node, std::uint32_t tier);  // the ids that no other one keeps
  // Demotes everything that begins with a key, and the end of the key that no other sequence shares: it is evicted
  // first on the first `tiers` tiers, until it is used again. Returns its nodes; none if the tree has less of the key
  // and others go on from there.
  std::vector<Handle> demote(std::string_view ns, Bytes key, std::uint32_t tiers);
  // Announces the next use of the sequence that begins with a key, as far as the tree has it: at `due`, by a clock that
  // never goes back. The latest announcement counts, until the next use. `account`: its giver, who pays for wrong ones.
  // Returns the pages of the key that are there.
  std::uint32_t expect(std::string_view ns, Bytes key, Account account, double now, double due);
  void note_time(double now) { eviction_.note_time(now); }

  // Gives owners of namespaces their shares: those with a name in `named`, and each other one. A namespace without a
  // tenant, a salt or a name has none unless it is among them, as "". Ids beyond a maximum go first from now on.
  void share_out(Shares others, const std::map<std::string, Shares>& named);

  // ---- transfers
  void attach(Handle node, std::uint32_t component, std::uint32_t tier, IdSpan ids, bool ready);
  void commit(Handle node, std::uint32_t tier);
  // Also removes what was inserted after them; its ids are freed when it is evicted or its own transfer ends.
  std::vector<Ids> cancel(Handle node, std::uint32_t tier);  // by component

  // ---- eviction and removal
  // Evicts at most so many ids of a component, and returns ids by component. With shares, room is made for the owner of
  // a namespace, see Eviction::victim; without one, whatever the shares are.
  std::vector<Ids> evict(std::uint64_t ids, std::uint32_t component, std::uint32_t tier,
                         std::optional<std::string_view> ns = std::string_view{});
  // Removes the page that a key ends in, and everything after it: no match finds them any more, on any tier. An empty
  // key removes the whole namespace. A node that is locked or in flight stays until it is released; then it is evicted
  // first. Returns the number of pages removed.
  std::uint64_t remove(std::string_view ns, Bytes key);
  std::vector<Ids> evict_removed(std::uint32_t tier);  // all removed nodes that can be evicted now, as by evict()
  // Evicts the last pages of the first component of one candidate, whatever its rank. The policy does not take this as
  // a sign of the capacity.
  Ids drop(Handle node, std::uint64_t pages, std::uint32_t tier);
  // Evicts states above a node, those that save the least first, until the path holds at most `limit`, the node's own
  // included. Locked states and states that other sequences share stay, so the limit is soft where prompts part.
  Ids thin(Handle node, std::uint32_t component, std::uint32_t tier, std::uint32_t limit);

  // Policy "external": gives a candidate its rank; see waiting().
  void rank(Handle node, std::uint32_t component, std::uint32_t tier, Rank rank) {
    eviction_.rank(nodes_.resolve(node), cells_.find_column(component, tier), rank);
  }

  // The node that evict() takes first, or 0.
  Handle next_victim(std::uint32_t component, std::uint32_t tier, std::uint64_t want = 1, std::string_view ns = {}) {
    return nodes_.handle(eviction_.victim(cells_.find_column(component, tier), cells_.find_owner(ns), want));
  }
  void check() const;

  // ---- the journal
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

 private:
  friend struct Probe;  // benchmarks and tests look at the memory itself

  struct Piece {  // a node to be added
    std::uint32_t end = 0;
    Index node = kNone;
    Structure::Key key;
    std::array<Run<std::int32_t>, kMaxComponents> ids;  // empty: absent
  };
  struct Insertion;

  Index end_at(Walk* path, std::uint32_t pages);
  bool parts_from_another(std::uint32_t pages) const;
  template <class Each>
  void end_transfer(Index node, std::uint32_t tier, Each each);
  std::vector<Index> inserted_after(Index node, std::uint32_t tier) const;
  Why reason(Index node, std::size_t column, OwnerId owner, std::uint64_t want) const;
  void reserve_freed(Index node, std::vector<Ids>* freed) const;
  void trim(Index node, std::uint32_t pages, std::uint32_t tier, std::vector<Ids>* freed);
  void evict_one(Index node, std::uint64_t want, std::uint32_t component, std::uint32_t tier, std::vector<Ids>* freed);
  std::uint32_t cut_to(Walk* path, std::uint32_t pages) const;
  std::pair<std::vector<Index>, Index> beginning_with(std::string_view ns, Bytes key);
  Retained retain_walk(std::uint32_t tier, const IdCounts& room, bool all);
  std::vector<Index> children_like(Index parent, Bytes tail) const;

  Walk path_;  // these are kept between calls for their memory
  std::vector<Piece> pieces_;
};

}  // namespace mainstem
