// The policies by name: a rank computed from the node alone, or an object that remembers more (policies/).
#pragma once

#include <memory>
#include <string_view>

#include "eviction/policies/arc.h"
#include "eviction/policies/gittins.h"
#include "eviction/policies/tail.h"

namespace mainstem {

struct Policy {
  std::string_view name;
  // The rank of a node last used at `used`; slru protects nodes with at least `protected_hits` hits. Null: ranks are
  // external, see Tree::waiting().
  Rank (*rank)(const Node&, std::uint64_t used, std::uint32_t protected_hits);
  // Whether a node that is evicted and loaded again gets the rank that it would have had. Not where uses are counted.
  bool keeps_order = false;
  // For the first component; the others use the rank.
  std::unique_ptr<Replacement> (*make)(const Surroundings&) = nullptr;
};

inline constexpr std::uint32_t kSlruProtectedHits = 2;

inline Rank by_recency(const Node&, std::uint64_t used, std::uint32_t) {
  return {number(used), 0};
}
template <class Kind>
std::unique_ptr<Replacement> make(const Surroundings& around) {
  return std::make_unique<Kind>(around);
}

// clang-format off
inline constexpr Policy kPolicies[] = {
    {"lru",      by_recency, true},
    {"lfu",      [](const Node& n, auto used, auto) { return Rank{number(n.hits), number(used)}; }},
    {"fifo",     [](const Node& n, auto, auto) { return Rank{number(n.created), 0}; }, true},
    {"mru",      [](const Node&, auto used, auto) { return Rank{-number(used), 0}; }, true},
    {"filo",     [](const Node& n, auto, auto) { return Rank{-number(n.created), 0}; }, true},
    {"slru",     [](const Node& n, auto used, auto hits) { return Rank{n.hits >= hits ? 1.0 : 0.0, number(used)}; }},
    {"priority", [](const Node& n, auto used, auto) { return Rank{static_cast<double>(n.priority), number(used)}; }, true},
    {"arc",      by_recency, false, make<Arc>},
    {"gittins",  by_recency, false, make<Gittins>},
    {"tail",     by_recency, false, make<TailAware>},
    {"external", nullptr},
};
// clang-format on

}  // namespace mainstem
