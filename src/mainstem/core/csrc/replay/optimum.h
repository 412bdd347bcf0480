// Optimum: the hits of the best policy that knows the future and evicts leaves only.
//
// Belady (A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966): evict the
// block whose next use is latest. A block is used whenever a block below it is, so a latest block that is a leaf always
// exists, and the rule stays optimal for blocks of one size. As in Replica, a request looks up all its blocks, then
// stores the missing ones, then the cache is trimmed to its capacity.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "structure/children.h"
#include "structure/node.h"

namespace mainstem {

class Optimum {
 public:
  void add(std::span<const std::uint64_t> blocks);  // the next request
  void finish();                                    // no more requests
  // Writes the blocks that each request hits at this capacity to `hits`. Returns how many blocks were evicted.
  std::uint64_t run(std::uint64_t capacity, std::int32_t* hits) const;

  std::size_t requests() const { return ends_.size(); }
  std::size_t distinct() const { return parents_.size() - 1; }

 private:
  static constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();

  Index child(Index parent, std::uint64_t block);
  std::span<const Index> path(std::size_t request) const;

  std::vector<Index> accesses_;  // of all requests in order: nodes of the tree of all blocks
  std::vector<std::size_t> ends_;
  std::vector<std::uint32_t> next_uses_;  // for each access: the next request with this node
  // By node; 0 is the root.
  std::vector<Index> parents_{kNone};
  std::vector<std::uint64_t> blocks_{0};
  ChildTable table_;  // by parent and block
};

}  // namespace mainstem
