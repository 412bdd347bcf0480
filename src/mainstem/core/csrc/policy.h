// The policies by name: a rank computed from the node alone, or an object that remembers more (policies/).
#pragma once

#include <memory>
#include <string_view>

#include "policies/arc.h"
#include "policies/flop_aware.h"
#include "policies/gdsf.h"
#include "policies/gittins.h"
#include "policies/lru2.h"
#include "policies/s3_fifo.h"
#include "policies/sieve.h"
#include "policies/two_queues.h"
#include "policies/w_tiny_lfu.h"

namespace mainstem {

struct Policy {
  std::string_view name;
  // The rank of a node last used at `used`; slru protects nodes with at least `protected_hits` hits. Null: ranks are
  // external, see Tree::waiting().
  Rank (*rank)(const Node&, std::uint64_t used, std::uint32_t protected_hits);
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
    {"lru",      by_recency},
    {"lfu",      [](const Node& n, auto used, auto) { return Rank{number(n.hits), number(used)}; }},
    {"fifo",     [](const Node& n, auto, auto) { return Rank{number(n.created), 0}; }},
    {"mru",      [](const Node&, auto used, auto) { return Rank{-number(used), 0}; }},
    {"filo",     [](const Node& n, auto, auto) { return Rank{-number(n.created), 0}; }},
    {"slru",     [](const Node& n, auto used, auto hits) { return Rank{n.hits >= hits ? 1.0 : 0.0, number(used)}; }},
    {"priority", [](const Node& n, auto used, auto) { return Rank{static_cast<double>(n.priority), number(used)}; }},
    // LengthAwareCache: like lfu, but later positions first (Qin et al., "Mooncake", arXiv:2407.00079).
    {"length-aware", [](const Node& n, auto, auto) { return Rank{number(n.hits), -number(n.start)}; }},
    {"lru-2",      by_recency, make<Lru2>},
    {"2q",         by_recency, make<TwoQueues>},
    {"arc",        by_recency, make<Arc>},
    {"s3-fifo",    by_recency, make<S3Fifo>},
    {"sieve",      by_recency, make<Sieve>},
    {"w-tinylfu",  by_recency, make<WTinyLfu>},
    {"gdsf",       by_recency, make<Gdsf>},
    {"flop-aware", by_recency, make<FlopAware>},
    {"gittins",    by_recency, make<Gittins>},
    {"external", nullptr},
};
// clang-format on

}  // namespace mainstem
