// Ghosts: what the tree had and has no more. They answer, for a page that is in no node, whether it was evicted (and
// how), removed, or never here; of what they had to forget, that they cannot know.
//
// A page is known by its name: a keyed hash of its namespace and of everything up to its end. So a ghost holds no
// symbols, a name of one namespace is never found in another, and where a node was divided makes no difference.
//
//   an eviction --copy--> pending: the symbols, and the handles of where they were
//                            | settle(): when somebody asks, when something is removed, or when there are too many
//                         names, the oldest first, at most so many pages
//                            | pushed out by newer ones
//                         a filter: was here, or may have been
//
// An eviction is copied and no more: naming its pages costs a hash of all that is above them. Until then its place is
// the handle of the node that it ended, which names that end whatever is split. Where the tree forgets a handle that a
// pending eviction has, it leaves a note: of a join, where the end is now; of an eviction, the eviction itself.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "structure/structure.h"

namespace mainstem {

enum class Why : std::uint8_t { policy, quota, demoted, dropped, flushed, removed, unknown };

inline constexpr const char* kWhyNames[] = {"policy", "quota", "demoted", "dropped", "flushed", "removed", "unknown"};

struct Departure {  // of consecutive pages of one path, at once
  Why why = Why::unknown;
  std::uint32_t tier = 0;      // the last one that had them
  std::uint32_t hits = 0;      // of their node
  std::uint64_t accessed = 0;  // the tick of their last use
  std::uint64_t gone = 0;      // and that of the departure
  std::uint64_t space = 0;     // the name of the namespace
};

class Ghosts {
 public:
  struct Known {
    enum Kind { never, may_have_been, departed } kind = never;
    std::uint32_t number = 0;  // of the departure
    Departure departure{};
  };
  // `pages`: how many of them are remembered with what happened to them.
  Ghosts(const Structure& nodes, std::uint64_t seed, std::size_t pages);
  Ghosts(const Ghosts&) = delete;
  Ghosts& operator=(const Ghosts&) = delete;
  ~Ghosts();

  // ---- what the tree tells
  void expect(Why why, std::uint32_t tier) { why_ = why, tier_ = tier; }  // what goes next, goes so
  void reserve(std::size_t nodes) { marks_.resize(nodes); }
  // The last pages of a node go. Then it ends earlier; if that returned true, ends_earlier() says so.
  bool trimmed(Index node, std::uint32_t pages, std::uint64_t tick) noexcept {
    return !nodes_[node].removed && note(node, pages, 0, tick);
  }
  void ends_earlier(Index node) noexcept {
    pending_.back().parent = nodes_.identity(node);
    mark(node);
  }
  void reaped(Index node, std::uint64_t tick) noexcept;  // it is about to be freed; it may be a root
  void joined(Index upper, Index lower) noexcept {       // they are about to be
    if (marks_[upper]) [[unlikely]]
      note_join(upper, lower);
  }
  // All pages of nodes, of which nobody may find anything any more. Settles first.
  void removed(const std::vector<Index>& tops, Why why, std::uint64_t tick) noexcept;
  void removed_space(std::string_view ns) noexcept;
  void removed_page(std::string_view ns, Bytes key) noexcept;  // the last of a key

  // ---- what they answer
  void settle() noexcept;
  std::uint64_t name_of(std::string_view ns) const;
  std::uint64_t name_after(std::uint64_t before, const std::uint8_t* page) const;
  Known find(std::uint64_t name) const;
  // What `find` calls never seen is so since this tick; before it, nothing is known. 0: since the tree was made.
  std::uint64_t horizon() const { return horizon_; }
  // Forgets of evicted pages those that are in the tree again.
  void sweep(std::uint64_t tick) noexcept;
  // Pages that were evicted, with their last uses; each once, after a sweep.
  template <class Each>
  void each_evicted(Each each) const;
  std::uint64_t latest_forgotten() const { return latest_forgotten_; }  // last use of a page in the filter
  std::size_t size() const { return table_.size(); }
  std::size_t bytes() const;

 private:
  struct Pending {
    Handle self, parent;  // what ended where it ends, and where it begins
    std::uint64_t at;     // in `symbols_`
    std::uint32_t start, pages;
    Departure departure;
  };
  struct Page {
    std::uint64_t name;
    std::uint32_t departure, start;
  };
  class Filter;

  bool room_for(std::uint32_t pages) noexcept;
  bool note(Index node, std::uint32_t pages, Handle parent, std::uint64_t tick) noexcept;
  void note_join(Index upper, Index lower) noexcept;
  void mark(Index node) noexcept { marks_[node] = 1; }
  void unmark(Handle end) noexcept {
    if (const Index node = nodes_.find(end)) marks_[node] = 0;
  }
  void settle_all();
  void lose() noexcept;
  bool name_at(Handle end, std::uint32_t depth, std::uint64_t* name, std::uint64_t* space);
  void depart(const Departure& departure, std::uint64_t before, std::uint32_t start, Bytes key);
  void remember(const Page& page) noexcept;
  void forget(std::uint64_t name, const Departure& departure) noexcept;
  void erase(std::uint64_t name) noexcept;
  std::uint32_t place(std::uint64_t name) const {  // in `ring_`, from 1 on; 0: none
    return table_.find(static_cast<std::uint32_t>(name >> 32), [&](Index at) { return ring_[at - 1].name == name; });
  }

  const Structure& nodes_;
  const std::uint64_t seed_, seed2_;
  const std::size_t most_;  // pages
  Why why_ = Why::unknown;
  std::uint32_t tier_ = 0;

  // ---- pending
  std::vector<Pending> pending_;
  std::unique_ptr<std::uint8_t[]> symbols_;
  std::size_t used_ = 0;
  std::vector<std::pair<Handle, Handle>> joins_;              // where an end is now
  std::vector<std::pair<Handle, std::uint64_t>> gone_roots_;  // and the names of namespaces
  Array<std::uint8_t> marks_;                                 // by node: something pending begins where it ends

  // ---- names
  std::vector<Page> ring_;
  std::size_t first_ = 0, count_ = 0;  // of the ring
  ChildTable table_;                   // from names to places in the ring
  std::vector<Departure> departures_;  // by number, modulo their count
  std::uint32_t departed_ = 0;         // how many there were
  std::unique_ptr<Filter> filter_;
  std::uint64_t horizon_ = 0, latest_forgotten_ = 0, swept_ = 0;

  // While settling.
  std::unordered_map<Handle, Handle> moved_;
  std::unordered_map<Handle, std::uint64_t> spaces_;
  std::unordered_map<Handle, std::size_t> ended_;
  struct Named {
    std::uint32_t depth;
    std::uint64_t name, space;
  };
  std::unordered_map<Handle, Named> names_;  // of ends
  std::vector<std::uint64_t> path_;
};

template <class Each>
void Ghosts::each_evicted(Each each) const {
  for (std::size_t i = 0; i < count_; ++i) {
    const std::size_t at = (first_ + i) % ring_.size();
    const Page& page = ring_[at];
    if (page.departure == 0 || place(page.name) != at + 1) continue;
    const Departure& departure = departures_[page.departure % departures_.size()];
    if (departure.why != Why::removed) each(page.start, departure.accessed);
  }
}

}  // namespace mainstem
