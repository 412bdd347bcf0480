// Structs of counters. The fields of one are listed once, each with what it counts. The struct is made from that list,
// and so is `each`, which shows every field to a visitor: the bindings name none of them again.
//
//   #define MAINSTEM_TRIPS(COUNT) COUNT(begun, "Trips begun.") COUNT(metres, "Metres travelled.")
//   MAINSTEM_COUNTERS(Trips, NoCounters, MAINSTEM_TRIPS);
#pragma once

#include <cstdint>

namespace mainstem {

// The base of a struct that extends no other.
struct NoCounters {
  template <class Visit>
  static void each(const Visit&) {}
  bool operator==(const NoCounters&) const = default;
};

#define MAINSTEM_COUNTER_FIELD(name, what) std::uint64_t name = 0;
#define MAINSTEM_COUNTER_VISIT(name, what) visit(#name, what, &Self::name);

#define MAINSTEM_COUNTERS(Name, Base, LIST)       \
  struct Name : Base {                            \
    using Self = Name;                            \
    LIST(MAINSTEM_COUNTER_FIELD)                  \
    template <class Visit>                        \
    static void each(const Visit& visit) {        \
      Base::each(visit);                          \
      LIST(MAINSTEM_COUNTER_VISIT)                \
    }                                             \
    bool operator==(const Name&) const = default; \
  }

}  // namespace mainstem
