// Journal: which pages of the first component came to a tier or left it, in order, for those who listen.
//
// A page is listed on a tier as long as a match can find it there: its cell is present, and its node was not removed.
// Splits and joins move no page, so they leave no trace.
//
// A page's hash covers its namespace, the pages before it and its symbols, under a key. The journal keeps the hash of
// every page by tier and page id: an id follows its page through splits and joins, so that a page that leaves is known
// by its id alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "residency/residency.h"
#include "structure/structure.h"
#include "tree/siphash.h"

namespace mainstem {

inline constexpr std::uint32_t kStorage = 2, kAbove = 3;

// Consecutive pages of one path that came to a tier, or pages that left it.
struct Moved {
  bool stored;
  std::uint32_t medium;       // a tier, or storage; kAbove: nowhere new, but what follows in storage continues it
  std::uint32_t start;        // of the first page, from the root; these four for pages that came
  std::uint64_t before;       // the hash of the page before the first one, or of the namespace
  std::size_t space, tokens;  // where the bytes of the namespace and of the symbols begin
  std::size_t first, pages;   // of their hashes
};

struct MovedPages {
  std::vector<Moved> moves;
  std::vector<std::uint64_t> hashes;
  std::vector<std::uint8_t> bytes;  // of each move that stored: the name of the namespace, then the symbols

  void clear() {
    moves.clear();
    hashes.clear();
    bytes.clear();
  }
};

class Journal {
 public:
  // `places`: by tier, the number above all page ids. `limit`: of pages that are noted and not taken yet.
  Journal(const Structure& nodes, const Residency& cells, std::string_view key,
          const std::vector<std::uint32_t>& places, std::size_t limit);

  // ---- what the tree notes
  void came(Index node, std::size_t column) noexcept;     // ids came to a cell: present, or in flight
  void arrived(Index node, std::size_t column) noexcept;  // they are present now
  void left(Index node, std::size_t column, IdSpan ids) noexcept;
  // Pages from `begin` to the end of a node were written to storage, from the host; those of a node were deleted there.
  // The pages before them are noted, too, unless they were: nobody could say later what those in storage continue.
  void written(Index node, std::uint32_t begin) noexcept;
  void deleted(Index node) noexcept;
  void require_place(std::uint32_t tier, IdSpan ids) const;

  // ---- what listeners take
  // Returns the moves since the last clear(), parents before children that came with them. If there were more than
  // `limit` pages, returns nothing, and lost() is true.
  const MovedPages& noted() noexcept;
  bool lost() const { return lost_; }
  void clear() noexcept;
  // Everything listed now, parents first.
  MovedPages listed() const;
  std::uint64_t dropped() const { return dropped_; }  // pages that were noted in vain
  std::uint64_t hash(std::uint32_t tier, std::int32_t id) const { return hashes_[tier][static_cast<std::size_t>(id)]; }

 private:
  bool concerns(std::size_t column) const { return column < hashes_.size(); }  // the first component comes first
  bool has_room(std::size_t pages, std::size_t bytes) noexcept;
  std::uint64_t hash_of_end(Index node) const;
  void note_stored(MovedPages* to, Index node, std::uint32_t tier, std::uint32_t medium, std::uint32_t from) const;
  void note_left(std::uint32_t tier, std::uint32_t medium, IdSpan ids) noexcept;
  bool is_in_storage(Index node, std::uint32_t page) const;
  void note_above(Index node, std::uint32_t end) noexcept;

  const Structure& nodes_;
  const Residency& cells_;
  SipKey of_pages_, of_spaces_;
  std::vector<std::vector<std::uint64_t>> hashes_;  // by tier, then by page id
  std::vector<bool> in_storage_;                    // by page id of the host: whether it was noted to be in storage
  MovedPages noted_;
  bool lost_ = false;
  std::uint64_t dropped_ = 0;
};

}  // namespace mainstem
