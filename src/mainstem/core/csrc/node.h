// The node and its cells. Links are indices, never pointers; index 0 is no node.
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

constexpr Index kHere = ~Index{0};  // of a cell: present

struct Cell {
  [[no_unique_address]] Run<std::int32_t> ids;  // the fields below fit into its padding
  std::uint32_t locks = 0;                      // locks of this node, and of nodes below that reach here
  std::uint32_t holders = 0;                    // children whose cell is not absent
  Index transfer = kNone;                       // absent: kNone; present: kHere; else the node that names the transfer

  bool absent() const { return transfer == kNone; }
  bool present() const { return transfer == kHere; }
  bool in_flight() const { return !absent() && !present(); }
  Residency residency() const {
    return absent() ? Residency::absent : present() ? Residency::present : Residency::in_flight;
  }
};

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

// The standing of a window or a state among its own kind: see Tree::rank_of().
struct Standing {
  double worth = 0;
  Tick used;  // when it was inserted, or a match last needed it; passing over it does not count
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
  std::uint32_t generation : 28 = 0;  // bumped when handles to this node go stale
  std::uint32_t live : 1 = false;
  std::uint32_t removed : 1 = false;   // no match finds it: see Tree::remove()
  std::uint32_t detached : 1 = false;  // the first removed node on its path
  std::uint32_t forked : 1 = false;    // a match ended here and parted from what is below: see Tree::thin()

  static constexpr std::uint32_t kFork = 1, kChild = 2;  // in `branches`
  static constexpr std::uint32_t kMaxGenerations = (1u << 28) - 1;

  std::uint32_t children() const { return forks() ? 2 : branches / kChild; }
  bool forks() const { return branches & kFork; }
  std::uint32_t fork_at() const { return branches - kFork; }
  std::uint32_t end() const { return start + pages; }
  bool root() const { return parent == kNone; }
  void outdate() { generation = generation == kMaxGenerations ? 1 : (generation + 1) & kMaxGenerations; }
};

// The size of a node decides the size of a large tree.
static_assert(sizeof(Cell) == 32 && sizeof(Node) == 80);

}  // namespace mainstem
