// The parts of the random tests; each throws a Failure. A seed gives the same run everywhere.
#pragma once

#include <cstdint>

namespace mainstem {

void random_tree(std::uint64_t seed, std::uint32_t operations);        // for each kind of tree
void random_cache(std::uint64_t seed, std::uint32_t operations);       // for each kind of cache
void random_components(std::uint64_t seed, std::uint32_t operations);  // for each mixture of components
void random_tiers(std::uint64_t seed, std::uint32_t operations);       // for each kind of cache over two tiers
void random_replay(std::uint64_t seed, std::uint32_t operations);      // requests, for each kind of cache
void random_routing(std::uint64_t seed, std::uint32_t operations);     // events, for full and endless indexes
void random_peeks(std::uint64_t seed, std::uint32_t operations);       // in several threads, on one tree

}  // namespace mainstem
