// Replay: serves the requests of a trace with real trees. It handles blocks (one 8-byte symbol and one page each),
// times and capacities. Policies belong to the trees; files and models do not appear here.
//
//   a request's blocks   |<-- device -->|<-- host -->|<-- storage -->|<-- computed -->|
//                        0          best[0]      best[1]          best[2]            n
//
// All tiers get all blocks of every request: missing blocks are loaded from a lower tier that has them, or written from
// above. Then each tier is trimmed to its capacity, block by block, in the tree's own order.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "tree/tree.h"

namespace mainstem {

using Blocks = std::span<const std::uint64_t>;

// Counts by powers of two: [0] counts zeros, [i] counts numbers in [2^(i-1), 2^i).
struct Histogram {
  std::array<std::uint64_t, 65> counts{};
  void add(std::uint64_t value) { ++counts[static_cast<std::size_t>(std::bit_width(value))]; }
};

struct TierTotals {  // in blocks; ages in block accesses and in whole seconds
  std::uint64_t hits = 0, loaded = 0, written = 0, evicted = 0, expired = 0;
  Histogram age, idle, age_s, idle_s;
};

constexpr double kNoTtl = std::numeric_limits<double>::infinity();

// One cache: a tree, and the replay's records of its pages.
class Replica {
 public:
  // Evicts that many pages of a tier in the order of the tree. Returns their ids.
  using Evict = std::function<Ids(std::uint64_t pages, std::uint32_t tier)>;

  // The tree must have full attention only, pages of one 8-byte symbol, and a tier for each capacity.
  Replica(Tree* tree, const std::vector<std::uint64_t>& capacities, double ttl_s, Evict evict);

  std::uint32_t peek(Blocks blocks) const;  // blocks that any tier has
  // Drops blocks that were not used for longer than the time to live. Times must not decrease.
  void expire(double now_s);
  // Looks a request up, stores the missing blocks, trims. Writes the blocks found, by tier, to `hits`.
  void serve(double now_s, Blocks blocks, std::int32_t* hits);

  std::uint32_t tiers() const { return static_cast<std::uint32_t>(tiers_.size()); }
  const TierTotals& totals(std::uint32_t tier) const { return tiers_[tier].totals; }
  std::size_t bytes() const;  // without the tree

 private:
  struct Visit {  // the time of a request: in accesses (only differences matter), and in seconds
    std::uint32_t at;
    float at_s;
  };
  struct Stamp {  // for a page: the visits that stored it and that used it last
    std::uint32_t born, used;
  };
  static constexpr std::size_t kFewVisits = 1 << 12;  // not worth a cleanup
  struct Link {  // for a page, with a time to live: its block, and its place in the order of use, oldest last
    std::uint64_t block;
    std::int32_t parent, newer, older;
  };
  struct Tier {
    std::uint64_t capacity;
    TierTotals totals;
    Array<Stamp> stamps;
    std::vector<Link> links;  // the last one closes the ring
    Ids free;
    Ids path;  // page ids of the current request
    std::uint32_t held = 0;

    Stamp& stamp(std::int32_t page) { return stamps[static_cast<std::size_t>(page)]; }
    Link& link(std::int32_t page) { return links[static_cast<std::size_t>(page + 1)]; }
    void unlink(std::int32_t page) {
      link(link(page).newer).older = link(page).older;
      link(link(page).older).newer = link(page).newer;
    }
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
  bool expired(Tier& tier, std::int32_t page) const;
  void expire_run(std::uint32_t tier);

  Tree* tree_;
  Evict evict_;
  double ttl_s_;
  std::vector<Tier> tiers_;
  Array<Visit> visits_;  // those that pages refer to, and some obsolete ones
  std::size_t max_visits_ = kFewVisits;
  std::uint32_t now_ = 0;  // accesses so far
  double now_s_ = 0;
  std::deque<std::pair<double, std::uint32_t>> recent_;  // requests within the time to live: time, and now_ after it
  std::uint32_t expired_at_ = 0;                         // pages last used up to this count have expired
  bool any_expired_ = false;
};

enum class Routing { round_robin, prefix, hash };

// Independent caches, and the routing of requests to them.
class Replay {
 public:
  static constexpr double kHalfLife_s = 60;   // of a replica's load
  static constexpr std::uint32_t kWorth = 2;  // a prefix counts if it is at least 1 / kWorth of the request
  // Routing by prefix skips a replica whose load exceeds both kBusy times the mean and the mean plus kBusyRequests.
  static constexpr double kBusy = 1.5, kBusyRequests = 32;

  Replay(std::vector<Replica> replicas, Routing routing)
      : replicas_(std::move(replicas)), loads_(replicas_.size()), routing_(routing) {}

  // Serves a request of `tokens` tokens. Returns the replica that served it.
  std::uint32_t serve(double now_s, std::uint64_t tokens, Blocks blocks, std::int32_t* hits);

  const std::vector<Replica>& replicas() const { return replicas_; }

 private:
  struct Load {  // recent tokens, halved every kHalfLife_s
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
