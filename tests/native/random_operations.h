// The parts of the random tests; each throws a Failure. One seed, one run: the same everywhere.
#pragma once

#include <cstdint>

namespace mainstem {

void random_tree(std::uint64_t seed, std::uint32_t operations);        // so many for each kind of tree
void random_cache(std::uint64_t seed, std::uint32_t operations);       // so many for each kind of cache
void random_components(std::uint64_t seed, std::uint32_t operations);  // so many for each mixture of components
void random_tiers(std::uint64_t seed, std::uint32_t operations);       // so many for each kind of cache over two tiers
void random_replay(std::uint64_t seed, std::uint32_t operations);      // so many requests for each kind of cache
void random_peeks(std::uint64_t seed, std::uint32_t operations);       // from several threads at one tree

}  // namespace mainstem
