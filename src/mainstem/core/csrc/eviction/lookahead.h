// Lookahead: how the order uses announcements of the next use of prefixes; the rules are in expected.h.
#pragma once

#include "eviction/eviction.h"

namespace mainstem {

class Lookahead {
 public:
  explicit Lookahead(Eviction& order) : order_(order), all_(order.expected_.get()) {}

  void expect(Index node, Account account, double now, double due);
  // A candidate takes its place among the expected ones. Returns whether the policy must not see it.
  bool offer(Index node, std::size_t column);
  // A request asks for pages: bets on those that are not there are lost.
  void ask(std::string_view ns, Index deepest, std::uint64_t root_name, Bytes key) noexcept;
  // A node is about to lose its last pages, or all, on the device.
  void trim(Index node, std::uint32_t pages) noexcept;
  void gone(Index node, bool was_present) noexcept;
  // Returns the node with the longest wait: the policy's choice or an expected one. An expected choice of the policy is
  // spared.
  Index choose();

 private:
  void begin();
  void end(Index node);
  void drop_from_policy(Index node);
  double rank_alone(Index node) const;

  Eviction& order_;
  Expected* all_;
};

}  // namespace mainstem
