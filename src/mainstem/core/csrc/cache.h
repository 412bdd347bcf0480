// Cache and Lease: who owns a page, and for how long.
//
//   free --reserve--> private (one lease) --publish--> cached (the tree) --evict--> free
//                         |                   |
//                         +------ finish -----+--- the tree had it already: the duplicate goes back to free
//
// Knows symbols and page ids; knows no tokens, no tensors and no Python. Positions are symbols. One thread at a time.
#pragma once

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

// The page ids of a sequence. Memory that was given out keeps what it showed: it is written behind its end only, and
// left to those who have it when the table needs more room or names other pages.
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
  std::int32_t* extend(std::size_t n) {  // reserve() first
    size_ += n;
    return memory_.get() + size_ - n;
  }
  void drop_back(std::size_t n) { size_ -= n; }
  Memory copy(std::size_t room) const;
  void exchange(Memory& other) { memory_.swap(other); }  // for a copy of the same room
  std::size_t room() const { return room_; }

 private:
  void move_to(std::size_t room);

  Memory memory_;
  std::size_t size_ = 0;
  std::size_t room_ = 0;
};

// What was left behind by a lease that was dropped: it may have been dropped on any thread, in the middle of anything.
struct Abandoned {
  Handle node;
  Handle donor;        // of a copy that was never ended, or 0
  Handle host_node;    // see Lease
  std::uint64_t load;  // that still writes to the pages, or 0
  Table table;
  std::size_t owned;
};

struct LeaseCounters {
  std::uint64_t leases = 0;  // open ones
  std::uint64_t queried = 0, hit = 0, partial_hit = 0, partial_missed = 0, duplicate_pages = 0, host_hit = 0;
};

class Cache {
 public:
  Cache(Tree& tree, Pool& pool, bool enabled) : tree(tree), pool(pool), enabled(enabled) {}
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Frees pages until n are free, or throws NoPages and has evicted nothing.
  void make_room(std::uint64_t n);
  void give_back(Handle node, IdSpan pages);
  void expect_lease() {  // so that abandon() cannot fail
    if (abandoned_.capacity() <= counters.leases) abandoned_.reserve(2 * counters.leases + 1);
  }
  void abandon(Abandoned left) noexcept { abandoned_.push_back(std::move(left)); }
  void take_back();
  void end_load(std::uint64_t load);  // of a lease that is closed

  // With more than one tier: ends of what was matched and published since the last call, for who copies it down. At
  // most kMostTouched; what comes then is left out.
  std::vector<Handle> take_touched() { return std::exchange(touched_, {}); }
  void touched(Handle node) noexcept;

  Tree& tree;
  Pool& pool;
  const bool enabled;                        // false: nothing is matched and nothing published
  std::function<void(std::uint64_t)> evict;  // frees about so many pages; empty: the tree's own order does
  LeaseCounters counters;

 private:
  friend class Lease;
  static constexpr std::size_t kMostTouched = 1 << 16;

  std::vector<Abandoned> abandoned_;
  std::vector<Handle> touched_;
  std::uint64_t loads_ = 0;  // begun so far
};

struct PageCopy {
  std::int32_t source, target;
  std::uint32_t positions;
};

// Pages of the host to be copied into private pages of a lease: source[i] to target[i].
struct PageLoad {
  std::uint64_t id;  // never 0
  Ids source, target;
};

class Lease {
 public:
  // Matches at most `most` positions of a key and locks what it finds. `inside`: note what of the next page agrees.
  Lease(Cache& cache, std::string_view ns, std::int32_t priority, Bytes key, std::uint64_t most, bool inside,
        const CheckRest& check_rest);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // The beginning of a shared page to be copied into a private one, if there is any and a page can be had. Until
  // end_copy() the shared page is locked.
  std::optional<PageCopy> begin_copy();
  void end_copy(bool copied);

  // What the host tier has behind the hit, into private pages: they stay private until end_load(), and so nobody else
  // finds what has not arrived. If the lease is closed before, its pages wait for Cache::end_load().
  std::uint64_t loadable() const { return std::uint64_t{host_pages_} * cache_.tree.page_size(); }
  PageLoad begin_load();
  void end_load(bool arrived);

  void reserve(std::uint64_t n);
  void append(Bytes symbols);
  void publish(std::uint64_t upto);
  void finish(std::optional<std::uint64_t> upto);
  void abort();

  bool closed() const { return closed_; }
  std::uint64_t length() const { return length_; }
  std::uint64_t hit() const { return hit_; }
  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t published() const { return std::uint64_t{owned_} * cache_.tree.page_size(); }
  std::uint64_t publishable() const { return load_ ? published() : std::min(reserved_, length_); }
  const Table& table() const {
    require_open();
    return table_;
  }
  void require_open() const {
    if (closed_) throw Closed{};
  }

 private:
  std::uint64_t missing_pages(std::uint64_t n) const;
  void count_once();
  void forget_host();
  void take_over(std::uint32_t end, std::uint32_t existing, Table::Memory ours);
  void forget_key(std::uint32_t pages);

  Cache& cache_;
  const std::string ns_;
  const std::int32_t priority_;
  Handle node_ = 0;          // its prefix is locked
  std::uint32_t owned_ = 0;  // pages at the front of the table that the tree owns; the rest are private
  Table table_;
  std::vector<std::uint8_t> key_;  // symbols from page `owned_` on, behind the first `key_begin_` bytes
  std::size_t key_begin_ = 0;
  std::uint64_t length_, hit_ = 0, reserved_ = 0;
  std::uint32_t inside_ = 0;  // positions of a page of `donor_` that agree with what follows
  std::int32_t source_ = -1;
  Handle donor_ = 0;
  Handle host_node_ = 0;          // its prefix is locked on tier 1, if the host has more than the device
  std::uint32_t host_pages_ = 0;  // that it has more
  std::uint64_t load_ = 0;        // between begin_load() and end_load(): private pages are being written
  bool copying_ = false;          // between begin_copy() and end_copy(): the last page of the table is being written
  bool appended_ = false, counted_ = false, closed_ = false;
};

}  // namespace mainstem
