// Router: which replica gets a request, by a rule with a name, and which other one could give it the pages that it
// lacks.
//
//   a request's blocks   |<- device -->|<- below it -->|<- another replica ->|<- computed ----->|
//                        0          reach[0]          reach               deepest               n
//
//   expected time to the first token at a replica
//     = queue      until it has computed what was sent to it
//     + compute    token_s x new tokens + pair_s x (pairs of a new token and a position at or before it)
//     + load       below_s x blocks of its lower tiers + peer_s x blocks of another replica, where that is sooner
//
// It knows the blocks that replicas hold from `Holders`, which may be late, and what it has sent to them itself. Knows
// no trees.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replay/holders.h"

namespace mainstem {

using Blocks = std::span<const std::uint64_t>;

enum class Routing { round_robin, two_choices, hash, consistent_hash, prefix, cost };

Routing parse_routing(const std::string& name);

struct RouterCosts {  // of one replica, in seconds; all zero: unknown
  double token_s = 0, pair_s = 0, below_s = 0, peer_s = 0;
  double block_tokens = 1;
};

struct Choice {
  std::uint32_t replica = 0;
  std::uint32_t peer = 0;        // which replica is asked
  std::uint32_t peer_reach = 0;  // blocks, from the first, that the peer holds; 0: none is asked
};

class Router {
 public:
  static constexpr double kHalfLife_s = 60;   // of a replica's load
  static constexpr std::uint32_t kWorth = 2;  // a prefix counts if it is at least 1 / kWorth of the request
  // Routing by prefix skips a replica whose load exceeds both kBusy times the mean and the mean plus kBusyRequests.
  static constexpr double kBusy = 1.5, kBusyRequests = 32;
  static constexpr double kNear = 1.125;  // routing by cost: what is nearly as soon, relative to the soonest

  Router(Routing routing, std::uint32_t replicas, bool peers, const RouterCosts& costs);

  // Whether the rule, or asking peers, depends on what replicas hold.
  bool looks_at_blocks() const;
  // Chooses for a request of `tokens` tokens, and counts it. Times must not decrease.
  Choice route(double now_s, std::uint64_t tokens, Blocks blocks, const Holders& holders);

 private:
  struct Reach {  // blocks of the request that a replica holds
    std::uint32_t device = 0, any = 0;
  };
  static constexpr double kRebase_s = 64 * kHalfLife_s;

  std::uint32_t choose(double now_s, std::uint64_t tokens, Blocks blocks);
  std::uint32_t choose_by_prefix(double now_s, std::size_t blocks);
  std::uint32_t choose_by_cost(double now_s, std::uint64_t tokens);
  std::uint32_t draw(std::uint64_t number, std::uint32_t below) const;
  void look(Blocks blocks, const Holders& holders);
  double service_s(std::uint32_t replica, std::uint64_t tokens) const;
  bool pulls(std::uint32_t replica, std::uint64_t tokens) const;
  double compute_s(std::uint64_t tokens, std::uint32_t blocks) const;
  void note(double now_s, std::uint64_t tokens, std::uint32_t replica);
  double scale(double now_s);

  Routing routing_;
  bool peers_;
  RouterCosts costs_;
  std::uint64_t served_ = 0, tokens_ = 0;
  // Loads are recent tokens, halved every kHalfLife_s. They are kept as of base_s_, so that time changes none of them.
  std::vector<double> loads_;
  double base_s_ = 0, sum_ = 0;
  std::vector<double> free_at_s_;   // when a replica has computed what was sent to it
  std::vector<double> expected_s_;  // of the current request

  // Of the current request:
  std::vector<std::uint64_t> names_;  // of its blocks
  std::vector<Reach> reaches_;        // by replica; those of `found_` only
  std::vector<std::uint32_t> found_;  // replicas that hold its first block
  std::vector<Holder> deepest_;       // those that hold most of it
  std::uint32_t deepest_reach_ = 0;
};

}  // namespace mainstem
