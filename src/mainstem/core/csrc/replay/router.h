// Router: which replica gets a request, by a rule with a name, and which other one could give it the pages that it
// lacks.
//
//   a request's blocks   |<- device -->|<- below it -->|<- another replica ->|<- computed ----->|
//                        0          device             host               deepest               n
//
// Routing by cost is the fleet's own `Ranking`. Like the fleet's front, the router knows the blocks that replicas hold
// from what it is told, which may be late, and expects that a replica will have what it was sent. Knows no trees.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "replay/holders.h"
#include "routing/ranking.h"

namespace mainstem {

using Blocks = std::span<const std::uint64_t>;

enum class Routing { round_robin, two_choices, hash, consistent_hash, prefix, cost };

Routing parse_routing(const std::string& name);

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

  // `times`: of each replica; those that read from no peers are asked for nothing.
  Router(Routing routing, std::uint32_t replicas, std::uint32_t block_tokens, const WorkerTimes& times);

  // Whether the rule, or asking peers, depends on what replicas hold.
  bool looks_at_blocks() const;
  // Chooses for a request of `tokens` tokens, of which a store that all replicas share has the first `stored` blocks,
  // and counts it. Times must not decrease.
  Choice route(double now_s, std::uint64_t tokens, Blocks blocks, std::uint32_t stored, Holders* holders);

 private:
  static constexpr double kRebase_s = 64 * kHalfLife_s;

  std::uint32_t choose(double now_s, std::uint64_t tokens, Blocks blocks);
  std::uint32_t choose_by_prefix(double now_s, std::size_t blocks);
  std::uint32_t draw(std::uint64_t number, std::uint32_t below) const;
  void look(Blocks blocks, std::uint32_t stored, const Holders& holders);
  bool pulls(std::uint32_t replica, std::uint64_t tokens) const;
  void note(double now_s, std::uint64_t tokens, std::uint32_t replica, Holders* holders);
  double scale(double now_s);

  Routing routing_;
  std::uint32_t block_tokens_;
  WorkerTimes times_;
  Ranking ranking_;
  std::vector<WorkerId> replicas_;  // all of them
  std::uint64_t served_ = 0, tokens_ = 0;
  // Loads are recent tokens, halved every kHalfLife_s. They are kept as of base_s_, so that time changes none of them.
  std::vector<double> loads_;
  double base_s_ = 0, sum_ = 0;

  // Of the current request:
  std::vector<std::uint64_t> names_;  // of its blocks
  Depths depths_;                     // by replica
  std::vector<std::uint32_t> found_;  // replicas that hold its first block
  std::vector<Holder> deepest_;       // those that hold most of it
  std::uint32_t deepest_reach_ = 0;
};

}  // namespace mainstem
