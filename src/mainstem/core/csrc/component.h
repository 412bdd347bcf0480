// Components: what a model keeps for a prefix. A row defines how each operation of the tree treats it; see the table
// "components x tiers x operations" in docs/design.md. To add a component, add a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace mainstem {

enum class Kind : std::uint8_t { full, window, state };

struct Component {
  Kind kind;
  std::uint32_t window = 0;        // symbols, for Kind::window
  std::uint32_t most_on_path = 0;  // for Kind::state: the most states on one path; 0: no limit
  bool weighs = false;             // for Kind::state: states that save more are evicted later, see Tree::rank_of

  bool per_page() const { return kind != Kind::state; }      // one id per page; otherwise one, at the node's end
  bool leaf_only() const { return kind == Kind::full; }      // evicted only where no child holds the cell
  bool from_tail() const { return kind == Kind::full; }      // evicted from the end; otherwise from the front
  bool begins_late() const { return kind == Kind::window; }  // may lack the first pages of a prefix
  bool locks_to_root() const { return kind == Kind::full; }
  bool divides() const { return kind != Kind::state; }  // on split both halves get ids

  std::size_t ids(std::size_t pages) const { return per_page() ? pages : 1; }

  // The first page that a match ending at `end` needs, and a lock there holds, of a component with one id per page.
  std::uint32_t first_needed(std::uint32_t end, std::uint32_t page_size) const {
    if (kind == Kind::full) return 0;
    const std::uint64_t symbols = std::uint64_t{end} * page_size;
    return static_cast<std::uint32_t>((symbols - std::min<std::uint64_t>(window, symbols)) / page_size);
  }
};

// The worth of a window's cell, see Tree::goes_first.
inline constexpr double kInserted = 1, kMatched = 2;

// Coverage: how much of one component is usable, up to the position that a walk has reached.
struct Coverage {
  std::uint32_t from = 0;   // every page in [from, here) is usable
  bool state_here = false;  // a usable state is exactly here

  void pass(const Component& row, bool usable, std::uint32_t end, bool whole_node) {
    state_here = row.kind == Kind::state && usable && whole_node;
    if (!usable) from = end;
  }
  // The three ways a match may end (docs/design.md, "Where a match may end").
  bool allows(const Component& row, std::uint32_t end, std::uint32_t page_size) const {
    if (row.kind == Kind::state) return state_here;
    return from <= row.first_needed(end, page_size);
  }
};

}  // namespace mainstem
