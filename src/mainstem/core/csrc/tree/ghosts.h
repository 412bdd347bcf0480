// Ghosts: what the tree had and has no more. They answer, for a page that is in no node, whether it was evicted (and
// how), removed, or never here; of what they had to forget, that they cannot know.
//
// A ghost stands for consecutive pages of one path that left together. It has the symbols of its node, and its place:
// the handles of the nodes at its beginning and end. These locate it, so nothing above it is read or hashed.
//
//   an eviction --copied--> a ring of ghosts, the oldest first, and one of their symbols: at most so many pages
//                            | index(): when somebody asks, new ones are entered by their first page, and by their end
//                            | pushed out by newer ones
//                          a filter: was here, or may have been
//
// A page is where a ghost says if the key has its symbols, and those of all pages above. The latter is so if the ghost
// begins at a live node on the key's path, or where a ghost ends of which the same is known. A split leaves handles
// where they are. When a node is joined to the one below it, a ghost without pages records its new end: it is older
// than every ghost that begins there later, and pushed out after all that began there before.
//
// The filter knows a page by its namespace, its place and its own symbols alone, so it can only say that a page may
// have been here.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "structure/structure.h"

namespace mainstem {

enum class Why : std::uint8_t { policy, quota, demoted, dropped, removed, unknown };

inline constexpr const char* kWhyNames[] = {"policy", "quota", "demoted", "dropped", "removed", "unknown"};

struct Departure {  // of consecutive pages of one path, at once
  Why why = Why::unknown;
  std::uint32_t tier = 0;      // the last one that had them
  std::uint32_t hits = 0;      // of their node
  std::uint64_t accessed = 0;  // the tick of their last use
  std::uint64_t gone = 0;      // and that of the departure
};

class Ghosts {
 public:
  struct Known {
    enum Kind { never, may_have_been, departed } kind = never;
    std::uint64_t number = 0;  // of the ghost
    Departure departure{};
  };
  struct Page {
    std::uint32_t number;    // on its path
    std::uint64_t accessed;  // the tick of its last use
  };
  // `pages`: how many of them are remembered with what happened to them.
  Ghosts(const Structure& nodes, std::uint64_t seed, std::size_t pages);
  Ghosts(const Ghosts&) = delete;
  Ghosts& operator=(const Ghosts&) = delete;
  ~Ghosts();

  // ---- what the tree tells
  void expect(Why why, std::uint32_t tier) { why_ = why, tier_ = tier; }  // what goes next, goes so
  void reserve(std::size_t nodes) { places_.resize(nodes); }
  void trimmed(Index node, std::uint32_t pages, std::uint64_t tick) noexcept;  // its last pages are about to go
  void reaped(Index node, std::uint64_t tick) noexcept;                        // to be freed; it may be a root
  void joined(Index upper, Index lower) noexcept {                             // they are about to be
    if (std::exchange(places_[upper], {}).begins && !nodes_[upper].removed) note_join(upper, lower);
  }
  // All pages of nodes are removed: nobody may find them any more. Removed symbols are not kept: from now on all ghosts
  // have hashes of their symbols.
  void removed(const std::vector<Index>& tops, Why why, std::uint64_t tick) noexcept;
  void removed_space(std::string_view ns) noexcept;
  void removed_page(std::string_view ns, Bytes key, const Walk& path);  // the last of a key

  // ---- what they answer
  // By page of a key from `from` on, as far as the last that is not never seen. `path`: the walk along the key.
  std::vector<Known> find(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from);
  // "Never seen" means: not since this tick; before it, nothing is known. 0: since the tree was made.
  std::uint64_t horizon() const { return horizon_; }
  std::vector<Page> evicted();  // pages that were evicted and are not in the tree, each once
  std::uint64_t latest_forgotten() const { return latest_forgotten_; }  // last use of a page in the filter
  std::size_t bytes() const;

 private:
  enum class Leads : std::uint8_t { no, yes, unknown };
  struct Ghost {
    std::uint64_t number = 0;     // from 1 on
    Handle self = 0, parent = 0;  // what ended where it ends, and where it begins
    std::uint64_t space = 0;      // the hash of the namespace
    std::size_t begin = 0;        // the place of its first page among symbols
    std::uint32_t start = 0, pages = 0;
    Departure departure;
    std::uint64_t first = 0, older = 0;  // in the index: the mark of its first page; the one before that has the same
    std::uint32_t query = 0, agree = 0;  // the last query that judged it, and how many pages agreed
    Leads above = Leads::no;             // whether those above did
    bool hashed = false;
  };
  struct Place {              // what a node has
    std::uint64_t space = 0;  // the hash of its namespace; 0: not known yet
    bool begins = false;      // a ghost begins where it ends
  };
  struct Holder {  // of a page: the place of a ghost in the ring, from 1 on, or a node, or nobody who is known
    Index slot, node;
  };
  class Filter;

  Ghost& at(std::uint64_t number) { return ring_[number % ring_.size()]; }
  Index slot(std::uint64_t number) const { return static_cast<Index>(number % ring_.size() + 1); }

  std::uint64_t hash(const std::uint8_t* page) const { return page_name(seed_, kNone, page, nodes_.page_bytes); }
  std::uint64_t hash(const Ghost& ghost, std::uint32_t page) const {
    return ghost.hashed ? load_word(symbols(ghost, page)) : hash(symbols(ghost, page));
  }
  const std::uint8_t* symbols(const Ghost& ghost, std::uint32_t page) const {
    return symbols_.data() + around(ghost.begin + page) * place_bytes_;
  }
  std::size_t around(std::size_t place) const { return place < most_ ? place : place - most_; }  // it is a ring
  std::uint64_t space_of(std::string_view ns) const;
  std::uint64_t space_of(Index node) noexcept;

  void leave(Index node, std::uint32_t pages, Handle parent, std::uint64_t tick, bool hashed = false) noexcept;
  void keep(const Ghost& ghost, const std::uint8_t* symbols) noexcept;
  void keep_hash(std::size_t place, const std::uint8_t* page) noexcept;
  void note_join(Index upper, Index lower) noexcept;
  Ghost& add(Handle self, Handle parent, std::uint32_t start, std::uint32_t pages) noexcept;
  void push_out() noexcept;
  template <class Hash>
  void forget(const Ghost& ghost, std::uint32_t begin, std::uint32_t end, std::uint32_t together, Hash hash) noexcept;

  void index() noexcept;
  std::uint64_t newest(std::uint64_t first) const;
  Holder holder(Handle end, std::uint32_t page) const;
  Leads leads_to(Handle end, std::uint32_t page, const Walk& path) const;
  void judge(Ghost& ghost, Bytes key, const std::vector<std::uint64_t>& hashes, const Walk& path) const;
  bool may_have_been(std::uint64_t space, const std::vector<std::uint64_t>& hashes, std::uint32_t page) const;

  const Structure& nodes_;
  const std::uint64_t seed_;
  const std::size_t most_;  // pages
  Why why_ = Why::unknown;
  std::uint32_t tier_ = 0;
  Array<Place> places_;  // by node

  // ---- the ring, and its index
  std::vector<Ghost> ring_;
  std::uint64_t first_ = 1, next_ = 1;      // numbers
  std::uint64_t indexed_ = 1, hashed_ = 1;  // all before these are
  std::size_t pages_ = 0;
  std::vector<std::uint8_t> symbols_;  // of the ghosts, in a ring, too; of some pages their hashes
  const std::size_t place_bytes_;      // in it, for a page
  std::size_t next_place_ = 0;
  std::size_t left_ = 0;      // pages whose symbols may be there still, though they are pushed out
  ChildTable firsts_, ends_;  // places in the ring, by first page and by end
  std::uint32_t query_ = 0;

  std::unique_ptr<Filter> filter_;
  std::uint64_t horizon_ = 0, latest_forgotten_ = 0;
};

}  // namespace mainstem
