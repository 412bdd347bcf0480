// Cache and Lease: the ownership of pages, and how long it lasts.
//
//   free --reserve--> private (one lease) --publish--> cached (the tree) --evict--> free
//                         |                   |
//                         +------ finish -----+--- the tree has it already: the duplicate is freed
//
// Handles symbols and page ids: no tokens, no tensors, no Python. Positions count symbols. One thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pool.h"
#include "tree.h"

namespace mainstem {

struct Closed {};

// The ids of one component for each page of a sequence, -1 where it has none. Memory that was handed out never changes:
// writes go after its end only, and the table moves to new memory when it needs more room or changes.
class Table {
 public:
  using Memory = std::shared_ptr<std::int32_t[]>;

  std::size_t size() const { return size_; }
  const Memory& memory() const { return memory_; }
  IdSpan from(std::size_t begin) const { return {memory_.get() + begin, size_ - begin}; }
  IdSpan part(std::size_t begin, std::size_t end) const { return {memory_.get() + begin, end - begin}; }

  void reserve(std::size_t n) {
    if (n > room_) move_to(std::max(n, 2 * size_));
  }
  std::int32_t* extend(std::size_t n) {  // call reserve() first
    size_ += n;
    return memory_.get() + size_ - n;
  }
  void drop_back(std::size_t n) { size_ -= n; }
  Memory copy(std::size_t room) const;
  void exchange(Memory& other) { memory_.swap(other); }  // for a copy of the same room
  std::size_t room() const { return room_; }
  // Returns memory that nobody else reads.
  std::int32_t* own() {
    if (memory_.use_count() > 1) move_to(room_);
    return memory_.get();
  }

 private:
  void move_to(std::size_t room);

  Memory memory_;
  std::size_t size_ = 0;
  std::size_t room_ = 0;
};

// What a lease holds of one component.
struct Holding {
  Table table;              // of a component with one id per page
  std::uint32_t front = 0;  // entries before this one are -1: they are before the window
  std::int32_t state = -1;  // of a state: the slot that the sequence computes with
  std::int32_t mark = -1;   // and a copy of it after `mark_pages` pages, to be published
  std::uint32_t mark_pages = 0;
};

// The holdings of all components. The first is stored inline, as most models have no other.
class Holdings {
 public:
  explicit Holdings(std::size_t components) : others_(components - 1) {}
  std::size_t size() const { return 1 + others_.size(); }
  Holding& operator[](std::size_t component) { return component ? others_[component - 1] : first_; }
  const Holding& operator[](std::size_t component) const { return component ? others_[component - 1] : first_; }

 private:
  Holding first_;
  std::vector<Holding> others_;
};

// What a dropped lease leaves. It may have been dropped on any thread, at any point.
struct Abandoned {
  Handle node;
  Handle donor;        // the donor of a copy that was never ended, or 0
  Handle host_node;    // see Lease
  std::uint64_t load;  // the load that still writes to the pages, or 0
  Holdings held;
  std::size_t owned;
};

struct LeaseCounters {
  std::uint64_t leases = 0;  // open ones
  std::uint64_t queried = 0, hit = 0, partial_hit = 0, partial_missed = 0, duplicate_pages = 0, host_hit = 0;
  std::uint64_t checkpoints = 0, checkpoints_missed = 0;  // states published; states without a free slot
};

class Cache {
 public:
  // `pools`: one of pages or slots for each component.
  Cache(Tree& tree, std::vector<Pool*> pools, bool enabled);
  Cache(Tree& tree, Pool& pool, bool enabled) : Cache(tree, std::vector<Pool*>{&pool}, enabled) {}
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Evicts ids of a component until n are free, or throws NoPages and evicts nothing.
  void make_room(std::uint64_t n, std::uint32_t component = 0);
  void allocate(std::uint64_t n, std::uint32_t component, Table* table) {  // of free ones, after its end
    table->reserve(table->size() + n);
    pools[component]->allocate(n, table->extend(n));
  }
  std::int32_t allocate_slot(std::uint32_t component);
  void free(std::uint32_t component, IdSpan private_ids);  // ignores -1
  void release_held(Handle node, Holdings& held, std::size_t owned);
  void expect_lease() {  // makes abandon() unable to fail
    if (abandoned_.capacity() <= counters.leases) abandoned_.reserve(2 * counters.leases + 1);
  }
  void abandon(Abandoned left) noexcept { abandoned_.push_back(std::move(left)); }
  void take_back() {
    if (!abandoned_.empty()) end_abandoned();
  }
  void end_load(std::uint64_t load);  // of a closed lease

  // With more than one tier: the ends of prefixes matched and published since the last call, to be copied down. At most
  // kMaxTouched; later ones are dropped.
  std::vector<Handle> take_touched() { return std::exchange(touched_, {}); }
  void touched(Handle node) noexcept;

  Tree& tree;
  const std::vector<Pool*> pools;  // by component
  const bool enabled;              // false: nothing is matched or published
  // The components of a lease: those with one id per page, those of them that slide, and states. With full attention
  // only: one, none and none.
  const std::vector<std::uint32_t> paged, windows, states;
  // Evicts about n ids of a component; empty: the tree's own order decides.
  std::function<void(std::uint32_t, std::uint64_t)> evict;
  std::function<void(std::int32_t, std::int32_t)> copy_state;  // from slot to slot
  LeaseCounters counters;

 private:
  friend class Lease;
  void end_abandoned();
  static constexpr std::size_t kMaxTouched = 1 << 16;

  std::vector<Abandoned> abandoned_;
  std::vector<Handle> touched_;
  std::uint64_t loads_ = 0;  // started so far
};

struct PageCopy {
  std::int32_t source, target;
  std::uint32_t positions;
};

// Copies from the host into private pages and slots of a lease: by component, source[i] to target[i].
struct PageLoad {
  std::uint64_t id = 0;  // never 0
  std::array<Ids, kMaxComponents> source, target;
};

class Lease {
 public:
  // Matches at most `limit` positions of a key and locks the match. `inside`: also match inside the next page.
  Lease(Cache& cache, std::string_view ns, std::int32_t priority, Bytes key, std::uint64_t limit, bool inside,
        const CheckRest& check_rest);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Starts copying the beginning of a shared page into a private one, if there is such a page and a private one can be
  // allocated. The shared page is locked until end_copy().
  std::optional<PageCopy> begin_copy();
  void end_copy(bool copied);

  // Loads what the host tier has after the hit into private pages. They stay private until end_load(), so nobody else
  // finds pages that have not arrived. If the lease is closed first, its pages are freed at Cache::end_load().
  std::uint64_t loadable() const { return std::uint64_t{host_pages_} * cache_.tree.page_size(); }
  PageLoad begin_load();
  void end_load(bool arrived);

  // Allocates full-attention pages for n more positions.
  void reserve(std::uint64_t n);
  // Positions [begin, end) are computed next: allocates window pages for them. Frees pages before the window of
  // `begin`.
  void slide(std::uint64_t begin, std::uint64_t end);
  // The state of the sequence is at `position`, a page boundary: a copy of it is published with the pages up to there.
  // Without `room`, uses a free slot only. Returns whether there was a slot.
  bool checkpoint(std::uint64_t position, bool room);
  void append(Bytes symbols);
  void publish(std::uint64_t upto);
  void finish(std::optional<std::uint64_t> upto);
  void abort();

  bool closed() const { return closed_; }
  std::uint64_t length() const { return length_; }
  std::uint64_t hit() const { return hit_; }
  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t published() const { return std::uint64_t{owned_} * cache_.tree.page_size(); }
  // How far the first component alone was matched.
  std::uint64_t reach() const { return std::uint64_t{reach_} * cache_.tree.page_size(); }
  std::uint64_t publishable() const;
  const Table& table(std::uint32_t component = 0) const {
    require_open();
    return held_[component].table;
  }
  std::int32_t state() const;  // -1: there is no such component
  void require_open() const {
    if (closed_) throw Closed{};
  }

 private:
  bool slides(std::uint32_t component) const { return cache_.tree.rows()[component].begins_late(); }
  std::uint32_t pages_of(std::uint64_t positions) const {  // rounded up
    const std::uint32_t page_size = cache_.tree.page_size();
    return static_cast<std::uint32_t>((positions + page_size - 1) / page_size);
  }
  std::uint64_t missing_pages(std::uint64_t n) const {
    if (slides(0)) return 0;
    const std::uint64_t pages = pages_of(reserved_ + n);
    return pages - std::min<std::uint64_t>(pages, held_[0].table.size());
  }
  void count_once();
  void forget_host();
  std::uint32_t load_from(std::uint32_t component, std::uint32_t end) const;
  bool host_has(const MatchResult& match) const;
  void revert_load();
  void take_state(std::uint32_t component);
  std::int32_t state_at_node(std::uint32_t component) const;
  void drop_before(std::uint32_t component, std::uint32_t first);
  void drop_before_windows() {
    for (const std::uint32_t c : cache_.windows)
      drop_before(c, cache_.tree.rows()[c].first_needed(owned_, cache_.tree.page_size()));
  }
  void publish_pages(std::uint32_t pages, std::uint32_t state_row);
  void adopt(std::uint32_t end, std::uint32_t existing, Table::Memory* spare);
  void adopt_sliding(std::uint32_t component, std::uint32_t end, std::int32_t* theirs);
  void settle_page(std::uint32_t component, std::int32_t ours, std::int32_t theirs);
  void settle_mark(std::uint32_t component);
  void drop_key(std::uint32_t pages);

  Cache& cache_;
  const std::string ns_;
  const std::int32_t priority_;
  Handle node_ = 0;                // its prefix is locked
  std::uint32_t owned_ = 0;        // pages at the front of the tables that the tree owns; the rest are private
  Holdings held_;                  // by component
  std::vector<std::uint8_t> key_;  // symbols from page `owned_` on, after the first `key_begin_` bytes
  std::size_t key_begin_ = 0;
  std::uint64_t length_, hit_ = 0, reserved_ = 0;
  std::uint32_t reach_ = 0;   // pages
  std::uint32_t inside_ = 0;  // positions of a page of `donor_` that agree with the key
  std::int32_t source_ = -1;
  Handle donor_ = 0;
  Handle host_node_ = 0;          // its prefix is locked on tier 1 if the host has more than the device
  std::uint32_t host_pages_ = 0;  // how many more
  std::uint64_t load_ = 0;        // between begin_load() and end_load(): private pages are being written
  bool copying_ = false;          // between begin_copy() and end_copy(): the last page of the table is being written
  bool appended_ = false, counted_ = false, closed_ = false;
};

}  // namespace mainstem
