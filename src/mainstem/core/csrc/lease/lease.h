// Lease: one request's hold on the cache, from its match to its last token. One thread at a time.
//
//   0          hit         published                reserved          length
//   |  locked   |  published  |  private, computed or to be  |  no pages yet  |
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lease/cache.h"

namespace mainstem {

struct Closed {};

struct PageCopy {
  std::int32_t source, target;
  std::uint32_t positions;
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
  std::uint64_t loadable() const { return std::uint64_t{host_pages_} * page_size(); }
  PageLoad begin_load();
  void end_load(bool arrived);

  // Allocates full-attention pages for n more positions. `counts`: whether the lease is a query of the cache.
  void reserve(std::uint64_t n, bool counts = true);
  // Positions [begin, end) are computed next: frees pages before the window of `begin`, then allocates window pages for
  // them. If there are too few, the freed pages stay free: nothing reads them any more.
  void slide(std::uint64_t begin, std::uint64_t end);
  // The state of the sequence is at `position`, a page boundary: a copy of it is published with the pages up to there.
  // Without `room`, uses a free slot only. With `mark`, other sequences are expected to part there. Returns whether
  // there was a slot.
  bool checkpoint(std::uint64_t position, bool room, bool mark = false);
  void append(Bytes symbols);
  void publish(std::uint64_t upto);
  void finish(std::optional<std::uint64_t> upto);
  void abort();

  bool closed() const { return closed_; }
  std::uint64_t length() const { return length_; }
  std::uint64_t hit() const { return hit_; }
  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t published() const { return std::uint64_t{owned_} * page_size(); }
  // How far the first component alone was matched.
  std::uint64_t reach() const { return std::uint64_t{reach_} * page_size(); }
  std::uint64_t publishable() const;
  const Table& table(std::uint32_t component = 0) const {
    require_open();
    return held_.table(component);
  }
  std::int32_t state() const {  // -1: there are no states
    require_open();
    return held_.states.empty() ? -1 : held_.states.front().slot;
  }
  void require_open() const {
    if (closed_) throw Closed{};
  }

  // For its holdings.
  Cache& cache() const { return cache_; }
  Handle node() const { return node_; }
  Handle host_node() const { return host_node_; }
  std::uint32_t owned() const { return owned_; }
  void make_room(std::uint64_t n, std::uint32_t component) {
    cache_.make_room(n, component, ns_);
    require_open();  // that may have run user code
  }

 private:
  std::uint32_t page_size() const { return cache_.tree.page_size(); }
  std::uint32_t pages_of(std::uint64_t positions) const {  // rounded up
    return static_cast<std::uint32_t>((positions + page_size() - 1) / page_size());
  }
  void count_once();
  void release_host();
  bool host_has(const MatchResult& match) const;
  void grow(Paged& own, std::uint64_t positions);
  void publish_pages(std::uint32_t pages, StateSlot* state);
  void drop_key(std::uint32_t pages);

  Cache& cache_;
  const std::string ns_;
  const std::int32_t priority_;
  Handle node_ = 0;          // its prefix is locked
  std::uint32_t owned_ = 0;  // pages at the front of the tables that the tree owns; the rest are private
  Holdings held_;
  std::vector<std::uint8_t> key_;  // symbols from page `owned_` on, after the first `key_begin_` bytes
  std::size_t key_begin_ = 0;
  std::uint64_t length_, hit_ = 0, reserved_ = 0;
  std::uint32_t reach_ = 0;   // pages
  std::uint32_t inside_ = 0;  // positions of a page of `donor_` that agree with the key
  std::int32_t source_ = -1;
  Handle donor_ = 0;
  Handle host_node_ = 0;          // its prefix is locked on the host, if that has more than the device
  std::uint32_t host_pages_ = 0;  // how many more
  std::uint64_t load_ = 0;        // between begin_load() and end_load(): private pages are being written
  bool copying_ = false;          // between begin_copy() and end_copy(): the last page of the table is being written
  bool appended_ = false, counted_ = false, closed_ = false;
};

}  // namespace mainstem
