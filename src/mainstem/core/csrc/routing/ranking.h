// Ranking: which worker should get a request, by when each would send its first token, as far as is known.
//
//   cost  =  queue  +  (1 + others + busy) * service          service  =  least over the ways to begin of load +
//   compute
//
//   ways to begin   what the device has | + host | + storage | + a peer
//   compute         token_s * n + attended_s * n * (positions before, and half of n), as the engines estimate it
//   load            latency + s for each token
//   queue           what the worker was sent and cannot have done yet, at the speed that it reports
//   others          what a worker computes although another one has it, those who come next wait for, and its pages
//   push
//                   others out. `kOthers` if the workers were in use for `kInUse` of the time lately or more, and none
//                   if they were idle: then nobody waits, and a request goes where its first token is soonest
//   busy            of the time lately, the share that the worker was in use. So equal workers get equal work
//
// A prefix that is asked for more often than one worker can serve is computed by another one as soon as waiting costs
// more: it is there from then on. Knows what is where from `RoutingIndex`; time is passed in.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "routing/index.h"

namespace mainstem {

// To load tokens takes latency_s + token_s * tokens.
struct LoadTime {
  double latency_s = 0, token_s = 0;
};

// What a worker's time goes to.
struct WorkerTimes {
  double token_s = 0, attended_s = 0;  // to compute; the second one for each position that a token attends to
  LoadTime host, storage;
  std::optional<LoadTime> peer;  // none: it reads from no peers
};

struct Estimate {
  WorkerId worker;
  double cost_s;         // by which workers are ordered
  double seconds;        // expected, until the first token
  double service_s;      // of that: loading and computing
  std::uint32_t cached;  // tokens that need not be computed
  double work_s;         // what the worker did lately
};

class Ranking {
 public:
  static constexpr double kHalfLife_s = 60;  // of the work that a worker did
  static constexpr double kOthers = 8, kInUse = 0.4;
  // A session stays where it was if that costs at most so much more, and this part of computing all of its prompt.
  static constexpr double kStay_s = 0.02, kStay = 0.1;

  explicit Ranking(RoutingIndex* index) : index_(index) {}

  void set_times(WorkerId worker, const WorkerTimes& times);
  // The worker says how much of what it was sent it has not computed yet.
  void set_queue(WorkerId worker, double tokens, double now_s);
  void forget(WorkerId worker);

  // The workers, the best first. `stay`: where the session of the request was.
  const std::vector<Estimate>& rank(Digest space, std::span<const std::uint32_t> tokens,
                                    std::span<const WorkerId> workers, std::optional<WorkerId> stay, double now_s);
  // A request goes to a worker, which is expected to have its pages soon.
  void sent(WorkerId worker, Digest space, std::span<const std::uint32_t> tokens, double now_s);
  void ended(WorkerId worker, double now_s);

 private:
  struct State {
    WorkerTimes times;
    double free_s = 0;               // when it will have done what it was sent
    double work_s = 0, work_at = 0;  // lately; halved every kHalfLife_s
    std::uint64_t under_way = 0;
    double work(double now_s) const;
  };

  State& at(WorkerId worker);
  static double busy(const Estimate& one);
  Estimate estimate(WorkerId worker, std::uint32_t tokens, std::uint32_t of_peers, double now_s);
  std::uint32_t on_peers(WorkerId but) const;

  RoutingIndex* index_;
  std::vector<State> states_;
  Depths depths_;  // of the last match
  std::vector<Estimate> ranked_;
};

}  // namespace mainstem
