// Cache: a tree, and the pools of pages and slots that its ids come from. Leases use it together, on one thread.
//
//   free --reserve--> private (one lease) --publish--> cached (the tree) --evict--> free
//                         |                   |
//                         +------ finish -----+--- the tree has it already: the duplicate is freed
//
// Handles symbols and page ids: no tokens, no tensors, no Python. Positions count symbols.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "lease/holding.h"
#include "lease/pool.h"
#include "structure/counters.h"
#include "tree/tree.h"

namespace mainstem {

// The holdings of a dropped lease. It may have been dropped on any thread, at any point.
struct Abandoned {
  Handle node;
  Handle donor;        // the donor of a copy that was never ended, or 0
  Handle host_node;    // see Lease
  std::uint64_t load;  // the load that still writes to the pages, or 0
  Holdings held;
  std::size_t owned;
};

#define MAINSTEM_LEASE_COUNTERS(COUNT)                                                                  \
  COUNT(open, "Leases that have not ended.")                                                            \
  COUNT(queried, "Positions that leases asked for, counted at their first `reserve`.")                  \
  COUNT(hit, "Positions of those that they reused.")                                                    \
  COUNT(partial_hit, "Positions hit that were copied from the middle of a page.")                       \
  COUNT(partial_missed, "Leases that found no page to copy the beginning of another into.")             \
  COUNT(duplicate_pages, "Pages freed at their publication, because another lease had published them.") \
  COUNT(host_hit, "Positions hit that were loaded from the host.")                                      \
  COUNT(checkpoints, "States published.")                                                               \
  COUNT(checkpoints_missed, "Checkpoints for which no slot was free.")
MAINSTEM_COUNTERS(LeaseCounters, NoCounters, MAINSTEM_LEASE_COUNTERS);

class Cache {
 public:
  // `pools`: one of pages or slots for each component.
  Cache(Tree& tree, std::vector<Pool*> pools, bool enabled);
  Cache(Tree& tree, Pool& pool, bool enabled) : Cache(tree, std::vector<Pool*>{&pool}, enabled) {}
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  const Component& row(std::uint32_t component) const { return tree.rows()[component]; }
  std::uint64_t free_ids(std::uint32_t component) const { return pools[component]->owned(Owner::free); }
  // Evicts ids of a component until n are free, or throws NoPages and evicts nothing. `ns`: for whom, see Tree::evict.
  void make_room(std::uint64_t n, std::uint32_t component, std::string_view ns);
  // Evicts what owners have beyond their maxima, as far as it is not in use.
  void settle() {
    if (tree.has_shares()) [[unlikely]]
      settle_all();
  }
  NoPages none(std::uint64_t n, std::uint32_t component, std::uint64_t evictable) const;
  void allocate(std::uint64_t n, std::uint32_t component, Table* table) {  // of free ones, after its end
    table->reserve(table->size() + n);
    pools[component]->allocate(n, table->extend(n));
  }
  std::int32_t allocate_slot(std::uint32_t component);
  void free(std::uint32_t component, IdSpan private_ids);  // ignores leading -1
  // Publishes a private id, or frees it if the tree has another in its place.
  void publish(std::uint32_t component, std::int32_t id, bool duplicate);
  void publish_page(std::uint32_t component, std::int32_t ours, std::int32_t theirs) {
    publish(component, ours, ours != theirs);
    counters.duplicate_pages += ours != theirs;
  }
  void end(Handle node, Holdings& held, std::size_t owned);  // of a lease
  void expect_lease() {                                      // makes abandon() unable to fail
    if (abandoned_.capacity() <= counters.open) abandoned_.reserve(2 * counters.open + 1);
  }
  void abandon(Abandoned left) noexcept { abandoned_.push_back(std::move(left)); }
  void end_abandoned() {
    if (!abandoned_.empty()) end_all_abandoned();
  }
  std::uint64_t begin_load() { return ++loads_; }
  void end_load(std::uint64_t load);  // of a closed lease

  // With a host tier: the ends of prefixes matched and published since the last call, to be copied down. At most
  // kMaxTouched; later ones are dropped.
  std::vector<Handle> take_touched() { return std::exchange(touched_, {}); }
  bool has_touched() const { return !touched_.empty(); }
  void touched(Handle node) noexcept;

  Tree& tree;
  const std::vector<Pool*> pools;  // by component
  const bool enabled;              // false: nothing is matched or published
  // Evicts about n ids of a component for a namespace; empty: the tree's own order decides.
  std::function<void(std::uint32_t, std::uint64_t, std::string_view)> evict;
  std::function<void(std::int32_t, std::int32_t)> copy_state;  // from slot to slot
  LeaseCounters counters;

 private:
  void settle_all();
  void evict_some(std::uint64_t n, std::uint32_t component, std::string_view ns);
  void end_all_abandoned();
  static constexpr std::size_t kMaxTouched = 1 << 16;

  std::vector<Abandoned> abandoned_;
  std::vector<Handle> touched_;
  std::uint64_t loads_ = 0;  // started so far
};

}  // namespace mainstem
