// The cell: ids, locks and presence of one component of one node on one tier.
//
//                     device                 host
//   component 0       cell                   cell
//   component 1       cell                   cell
#pragma once

#include <cstdint>

#include "structure/node.h"
#include "structure/run.h"

namespace mainstem {

enum class Presence : std::uint8_t { absent, in_flight, present };

constexpr Index kHere = ~Index{0};  // the `transfer` of a cell that is present

struct Cell {
  [[no_unique_address]] Run<std::int32_t> ids;  // the next field lies in its padding
  std::uint32_t locks = 0;                      // locks of this node and of nodes below that reach here
  std::uint32_t holders = 0;                    // children whose cell is not absent
  Index transfer = kNone;                       // absent: kNone; present: kHere; in flight: the node that names it

  bool absent() const { return transfer == kNone; }
  bool present() const { return transfer == kHere; }
  bool in_flight() const { return !absent() && !present(); }
  Presence presence() const {
    return absent() ? Presence::absent : present() ? Presence::present : Presence::in_flight;
  }
};

// A large tree takes as much memory as its nodes and cells.
static_assert(sizeof(Cell) == 32);

}  // namespace mainstem
