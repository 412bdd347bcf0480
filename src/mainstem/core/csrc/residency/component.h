// Components: what a model keeps for a prefix. A row defines how each operation of the tree treats it; see the table
// "components x tiers x operations" in docs/design.md. To add a component, add a kind, its names, and its answer to
// each question below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>

#include "structure/errors.h"

namespace mainstem {

enum class Kind : std::uint8_t { full, window, state, chunked };

inline constexpr const char* kKindNames[] = {"full", "window", "state", "chunked"};
inline constexpr const char* kIdNames[] = {"pages", "window pages", "state slots", "chunked pages"};

struct Component {
  Kind kind;
  std::uint32_t span = 0;          // for Kind::window and Kind::chunked: symbols
  std::uint32_t most_on_path = 0;  // for Kind::state: the most states on one path; 0: no limit
  bool weighs = false;             // for Kind::state: states that save more are evicted later, see eviction/

  // A component by the name of its kind; `number` is the span or the most on a path.
  static Component named(std::string_view name, std::uint32_t number, bool weighs) {
    if (name == kKindNames[0]) return {Kind::full};
    if (name == kKindNames[1] && number > 0) return {Kind::window, number};
    if (name == kKindNames[2]) return {Kind::state, 0, number, weighs};
    if (name == kKindNames[3] && number > 0) return {Kind::chunked, number};
    throw BadValue{"component", std::string(name) + "(" + std::to_string(number) + ")",
                   "full, state, or window or chunked of at least 1 symbol"};
  }

  const char* ids_name() const { return kIdNames[static_cast<std::size_t>(kind)]; }

  // One id per page, of which both halves of a split get theirs; otherwise one, at the node's end.
  bool per_page() const { return kind != Kind::state; }
  // A prefix needs all of it: it is evicted from the end, where no child holds the cell, and locked up to the root.
  bool leaf_only() const { return kind == Kind::full; }
  // May lack the first pages of a prefix.
  bool begins_late() const { return span > 0; }

  std::size_t ids(std::size_t pages) const { return per_page() ? pages : 1; }

  // The first position that is still read when `position` is computed.
  std::uint64_t first_read(std::uint64_t position) const {
    if (kind == Kind::full) return 0;
    if (kind == Kind::chunked) return position - position % span;  // 0 1 2 3 | 4 5 6: nothing at the boundary
    return position - std::min<std::uint64_t>(span, position);
  }
  // The first page that a match ending after `end` pages needs; for one id per page.
  std::uint32_t first_needed(std::uint32_t end, std::uint32_t page_size) const {
    return static_cast<std::uint32_t>(first_read(std::uint64_t{end} * page_size) / page_size);
  }
  // The first page that a lock on a prefix of `end` pages holds: a lock holds the last page, needed or not.
  std::uint32_t first_locked(std::uint32_t end, std::uint32_t page_size) const {
    const std::uint64_t position = std::uint64_t{end} * page_size;
    const bool boundary = kind == Kind::chunked && position > 0 && position % span == 0;
    return boundary ? static_cast<std::uint32_t>((position - span) / page_size) : first_needed(end, page_size);
  }
  // How many pages lie between two page boundaries at which a chunk begins; 0: there are no chunks.
  std::uint32_t boundary_pages(std::uint32_t page_size) const {
    return kind == Kind::chunked ? span / std::gcd(span, page_size) : 0;
  }
  // Whether a match ending after `end` pages needs an id at its end.
  bool needs_before(std::uint32_t end, std::uint32_t page_size) const {
    return !per_page() || first_needed(end, page_size) < end;
  }
};

// Coverage: how much of one component is usable, up to the position that a walk has reached.
struct Coverage {
  std::uint32_t from = 0;   // every page in [from, here) is usable
  bool state_here = false;  // a usable state is exactly here

  void pass(const Component& row, bool usable, std::uint32_t end, bool whole_node) {
    state_here = row.kind == Kind::state && usable && whole_node;
    if (!usable) from = end;
  }
  // The ways in which a match may end, by kind (docs/design.md, "Where a match may end").
  bool allows(const Component& row, std::uint32_t end, std::uint32_t page_size) const {
    if (row.kind == Kind::state) return state_here;
    return from <= row.first_needed(end, page_size);
  }
};

}  // namespace mainstem
