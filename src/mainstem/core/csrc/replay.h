// Replay: the requests of a trace, served by real trees. It knows blocks (a symbol of 8 bytes each, and a page), times
// and capacities; policies are the trees', and files and models are unknown here.
//
//   a request's blocks   |<-- device -->|<-- host -->|<-- storage -->|<-- computed -->|
//                        0          best[0]      best[1]          best[2]            n
//
// All tiers get all blocks of every request: what a tier lacks is loaded from the one below that has it, or written to
// it from above. Then each tier is trimmed to its capacity, block by block, by the tree's own order.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "tree.h"

namespace mainstem {

using Blocks = std::span<const std::uint64_t>;

// Counts by powers of two: [0] of zeros, [i] of the numbers in [2^(i-1), 2^i).
struct Histogram {
  std::array<std::uint64_t, 65> counts{};
  void add(std::uint64_t value) { ++counts[static_cast<std::size_t>(std::bit_width(value))]; }
};

struct TierTotals {  // in blocks; ages in block accesses and in whole seconds
  std::uint64_t hits = 0, loaded = 0, written = 0, evicted = 0, expired = 0;
  Histogram age, idle, age_s, idle_s;
};

constexpr double kNoTtl = std::numeric_limits<double>::infinity();

// One cache: a tree, and what the replay keeps of its pages.
class Replica {
 public:
  // Frees so many pages of a tier by the order of the tree; their ids.
  using Evict = std::function<Ids(std::uint64_t pages, std::uint32_t tier)>;

  // The tree has full attention alone, in pages of one 8-byte symbol, and a tier for each capacity.
  Replica(Tree* tree, const std::vector<std::uint64_t>& capacities, double ttl_s, Evict evict);

  std::uint32_t peek(Blocks blocks) const;  // blocks that any tier has
  // Blocks that were not used for longer than the time to live are gone. Times never fall.
  void expire(double now_s);
  // Looks a request up, stores what is missing, trims. `hits` gets the blocks found, by tier.
  void serve(double now_s, Blocks blocks, std::int32_t* hits);

  std::uint32_t tiers() const { return static_cast<std::uint32_t>(tiers_.size()); }
  const TierTotals& totals(std::uint32_t tier) const { return tiers_[tier].totals; }
  std::size_t bytes() const;  // without the tree

 private:
  struct Visit {  // of a request: when, by the count of accesses, of which only differences matter, and by the clock
    std::uint32_t at;
    float at_s;
  };
  struct Stamp {  // of a page: the visits that brought it and that used it last
    std::uint32_t born, used;
  };
  static constexpr std::size_t kFewVisits = 1 << 12;  // not worth a look
  struct Link {  // of a page, with a time to live: its block, and its place in the order of use, oldest last
    std::uint64_t block;
    std::int32_t parent, newer, older;
  };
  struct Tier {
    std::uint64_t capacity;
    TierTotals totals;
    Array<Stamp> stamps;
    std::vector<Link> links;  // the last one closes the ring
    Ids free;
    Ids path;  // pages of the request at work
    std::uint32_t held = 0;
  };

  void note_visit();
  void forget_visits();
  void look(const MatchResult& match, std::size_t n);
  void store(const MatchResult& match, Blocks blocks, std::uint32_t tier);
  void count(std::uint32_t found, std::uint32_t n, std::int32_t* hits);
  void trim(std::uint32_t tier);
  std::int32_t take(Tier* tier) const;
  void retire(Tier* tier, std::int32_t page);
  void note_use(Tier* tier, Blocks blocks) const;
  bool expired(const Tier& tier, std::int32_t page) const;
  void expire_run(std::uint32_t tier);

  Tree* tree_;
  Evict evict_;
  double ttl_s_;
  std::vector<Tier> tiers_;
  Array<Visit> visits_;  // those that pages name, and some that no page names any more
  std::size_t most_visits_ = kFewVisits;
  std::uint32_t now_ = 0;  // accesses so far
  double now_s_ = 0;
  std::deque<std::pair<double, std::uint32_t>> recent_;  // requests within the time to live: when, and now_ after them
  std::uint32_t expired_at_ = 0;                         // what was used up to this count has expired
  bool any_expired_ = false;
};

enum class Routing { round_robin, prefix, hash };

// Independent caches, and who gets which request.
class Replay {
 public:
  static constexpr double kHalfLife_s = 60;   // of a replica's load
  static constexpr std::uint32_t kWorth = 2;  // a prefix counts from this part of a request on: a half
  // By prefix, a replica is passed over whose load is above both: so many times the mean, and so many requests more.
  static constexpr double kBusy = 1.5, kBusyRequests = 32;

  Replay(std::vector<Replica> replicas, Routing routing)
      : replicas_(std::move(replicas)), loads_(replicas_.size()), routing_(routing) {}

  // Serves a request of so many tokens; the replica that did.
  std::uint32_t serve(double now_s, std::uint64_t tokens, Blocks blocks, std::int32_t* hits);

  const std::vector<Replica>& replicas() const { return replicas_; }

 private:
  struct Load {  // tokens of late, halved every kHalfLife_s
    double tokens = 0, at_s = 0;
    double at(double now_s) const;
  };
  std::uint32_t route(double now_s, Blocks blocks);
  std::uint32_t route_by_prefix(double now_s, Blocks blocks);

  std::vector<Replica> replicas_;
  std::vector<Load> loads_;
  Routing routing_;
  std::uint64_t served_ = 0, tokens_ = 0;
};

}  // namespace mainstem
