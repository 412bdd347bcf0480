// The node and its cells. Links are indices, never pointers; index 0 is nobody.
//
//                     tier 0 (device)        tier 1 (host)
//   component 0       cell                   cell             a cell holds ids, locks and residency of
//   component 1       cell                   cell             one component of one node on one tier
#pragma once

#include <cstdint>

#include "run.h"

namespace mainstem {

using Index = std::uint32_t;
constexpr Index kNone = 0;

enum class Residency : std::uint8_t { absent, in_flight, present };

struct Cell {
  Run<std::int32_t> ids;
  std::uint32_t locks = 0;    // locks of this node and of those below that reach here
  std::uint32_t holders = 0;  // children whose cell is not absent
  Index transfer = kNone;     // in flight: the node that the transfer is named by
  Residency residency = Residency::absent;

  bool absent() const { return residency == Residency::absent; }
  bool present() const { return residency == Residency::present; }
  bool in_flight() const { return residency == Residency::in_flight; }
};

struct Node {
  Run<std::uint8_t> key;      // pages * page_bytes; of a root the name of its namespace
  std::uint64_t created = 0;  // ticks of the tree's counter
  std::uint64_t accessed = 0;
  std::uint32_t hits = 0;
  std::int32_t priority = 0;
  std::uint32_t start = 0;    // pages from the root to this node
  std::uint32_t pages = 0;    // 0 for a root
  Index home = kNone;         // the root above
  Index parent = kNone;       // kNone for a root
  Index first_child = kNone;  // the oldest
  Index last_child = kNone;   // the youngest
  Index next = kNone;         // younger sibling
  Index previous = kNone;     // older sibling
  std::uint32_t children = 0;
  std::uint32_t fork_at = 0;     // of exactly two children: where in their first page they part (a word of 4 bytes),
  std::uint32_t fork_word = 0;   // and the word that the oldest has there
  std::uint32_t generation = 0;  // bumped when handles to this node go stale
  bool live = false;

  std::uint32_t end() const { return start + pages; }
  bool root() const { return parent == kNone; }
};

}  // namespace mainstem
