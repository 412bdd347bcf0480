// The node. Links are indices, never pointers; index 0 is no node.
//
//   key   |<------------- pages * page_bytes ------------->|      one Run of bytes
//       start                                             end    pages from the root
#pragma once

#include <cstdint>

#include "structure/run.h"

namespace mainstem {

using Index = std::uint32_t;
constexpr Index kNone = 0;

// A value of the tree's counter in six bytes: enough for 2**48 calls.
class Tick {
 public:
  Tick& operator=(std::uint64_t tick) {
    parts_[0] = static_cast<std::uint16_t>(tick);
    parts_[1] = static_cast<std::uint16_t>(tick >> 16);
    parts_[2] = static_cast<std::uint16_t>(tick >> 32);
    return *this;
  }
  operator std::uint64_t() const { return parts_[0] | std::uint64_t{parts_[1]} << 16 | std::uint64_t{parts_[2]} << 32; }

 private:
  std::uint16_t parts_[3] = {};
};

struct Node {
  [[no_unique_address]] Run<std::uint8_t> key;  // pages * page_bytes; for a root: the name of its namespace
  Tick created, accessed;
  std::uint32_t hits = 0;
  std::int32_t priority = 0;
  std::uint32_t start = 0;            // pages from the root to this node
  std::uint32_t pages = 0;            // 0 for a root
  Index parent = kNone;               // kNone for a root
  Index first_child = kNone;          // the oldest
  Index last_child = kNone;           // the youngest
  Index next = kNone;                 // younger sibling; for a free node: the next free node
  Index previous = kNone;             // older sibling
  std::uint32_t branches = 0;         // children * kChild; for two: kFork + the offset of the 4-byte word where
  std::uint32_t fork_word = 0;        // their first pages part, and the oldest child's word there
  std::uint32_t generation : 26 = 0;  // bumped when handles to this node go stale
  std::uint32_t live : 1 = false;
  std::uint32_t removed : 1 = false;   // no match finds it: see Tree::remove()
  std::uint32_t detached : 1 = false;  // the first removed node on its path
  std::uint32_t forked : 1 = false;    // matches part here from what is below, or will: see Tree::thin()
  std::uint32_t demoted : 2 = 0;       // on how many tiers, from the device down, it goes first: see Tree::demote()

  static constexpr std::uint32_t kFork = 1, kChild = 2;  // in `branches`
  static constexpr std::uint32_t kMaxGenerations = (1u << 26) - 1;

  std::uint32_t children() const { return forks() ? 2 : branches / kChild; }
  bool forks() const { return branches & kFork; }
  std::uint32_t fork_at() const { return branches - kFork; }
  std::uint32_t end() const { return start + pages; }
  bool root() const { return parent == kNone; }
  std::uint32_t next_generation() const { return generation == kMaxGenerations ? 1 : generation + 1; }
  void outdate() { generation = next_generation() & kMaxGenerations; }
};

// The size of a node decides the size of a large tree.
static_assert(sizeof(Node) == 80);

}  // namespace mainstem
