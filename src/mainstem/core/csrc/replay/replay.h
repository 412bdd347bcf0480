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

#include "replay/holders.h"
#include "replay/router.h"
#include "tree/tree.h"

namespace mainstem {

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

  // From now on, notes what comes to its tiers and what leaves them as changes of this replica.
  void report_to(Changes* changes, std::uint32_t replica);
  // Drops blocks that were not used for longer than the time to live. Times must not decrease.
  void expire(double now_s);
  // Looks a request up, stores the missing blocks, trims. Writes the blocks found, by tier, to `hits`.
  void serve(double now_s, Blocks blocks, std::int32_t* hits);

  std::uint32_t tiers() const { return static_cast<std::uint32_t>(tiers_.size()); }
  bool expires() const { return ttl_s_ < kNoTtl; }
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
    Array<std::uint64_t> names;  // of the pages' blocks, while changes are reported
    std::vector<Link> links;     // the last one closes the ring
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
  void retire(std::uint32_t tier, std::int32_t page);
  void report_arrivals(std::uint32_t tier, Blocks blocks);
  void note_use(Tier* tier, Blocks blocks) const;
  bool expired(Tier& tier, std::int32_t page) const;
  void expire_run(std::uint32_t tier);

  Tree* tree_;
  Evict evict_;
  double ttl_s_;
  std::vector<Tier> tiers_;
  Changes* changes_ = nullptr;  // none: nobody asks
  std::uint32_t number_ = 0;
  Array<Visit> visits_;  // those that pages refer to, and some obsolete ones
  std::size_t max_visits_ = kFewVisits;
  std::uint32_t now_ = 0;  // accesses so far
  double now_s_ = 0;
  std::deque<std::pair<double, std::uint32_t>> recent_;  // requests within the time to live: time, and now_ after it
  std::uint32_t expired_at_ = 0;                         // pages last used up to this count have expired
  bool any_expired_ = false;
};

// A batch of requests, by column: one entry for each request, except that `hits` gets the blocks found on each tier.
struct Served {
  std::span<const double> times_s;
  std::span<const std::uint64_t> offsets;
  Blocks blocks;
  std::span<const std::int32_t> replicas;
  std::int32_t* hits;
};

// Independent caches, and a router before them.
//
//   route(window)      -> serve(part 0) | serve(part 1) | ...      -> learn(part 0) | learn(part 1) | ...
//   one after another     replicas with number % parts == part        shards of what the router knows
//
// The router sees the replicas' blocks as they were at the end of the last window, for any number of parts: in a fleet,
// events reach a router late, too. `serve_one` is a window of one request.
class Replay {
 public:
  Replay(std::vector<Replica> replicas, Router router, std::uint32_t parts);
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Starts a window: drops what has expired by now.
  void begin(double now_s);
  Choice route(double now_s, std::uint64_t tokens, Blocks blocks, std::uint32_t stored) {
    return router_.route(now_s, tokens, blocks, stored, &holders_);
  }
  // Serves the requests of the window that were routed to the replicas of a part. Threads may serve different parts.
  void serve(std::uint32_t part, const Served& window);
  void learn(std::uint32_t part);
  Choice serve_one(double now_s, std::uint64_t tokens, Blocks blocks, std::uint32_t stored, std::int32_t* hits);

  const std::vector<Replica>& replicas() const { return replicas_; }
  const Router& router() const { return router_; }
  std::uint32_t parts() const { return static_cast<std::uint32_t>(changes_.size()); }
  std::size_t bytes() const;

 private:
  std::uint32_t part(std::uint32_t replica) const { return replica % parts(); }

  std::vector<Replica> replicas_;
  Router router_;
  Holders holders_;
  std::vector<Changes> changes_;  // by part
};

}  // namespace mainstem
