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
// more: it is there from then on. What each worker has is passed in, and so is time: the fleet's front knows it from
// events, a replay from its trees, and both choose by this one ranking.
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
  bool operator==(const LoadTime&) const = default;
};

// What a worker's time goes to.
struct WorkerTimes {
  double token_s = 0, attended_s = 0;  // to compute; the second one for each position that a token attends to
  LoadTime host, storage;
  std::optional<LoadTime> peer;  // none: it reads from no peers
  bool operator==(const WorkerTimes&) const = default;

  double compute_s(double tokens, double before) const {
    return tokens * (token_s + attended_s * (before + tokens / 2));
  }
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

  explicit Ranking(std::uint32_t page_tokens) : page_tokens_(page_tokens) {}

  void set_times(WorkerId worker, const WorkerTimes& times);
  // The worker says how much of what it was sent it has not computed yet.
  void set_queue(WorkerId worker, double tokens, double now_s);
  void forget(WorkerId worker);

  // The workers, the best first, for a prompt of which each has so many pages. `stay`: where the session of the request
  // was.
  const std::vector<Estimate>& rank(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers,
                                    std::optional<WorkerId> stay, double now_s);
  // The first of them, without the order of the others.
  WorkerId best(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers, double now_s);
  // A request goes to a worker.
  void sent(WorkerId worker, const Depths& depths, std::uint32_t tokens, double now_s);
  void ended(WorkerId worker, double now_s);

 private:
  struct State {
    WorkerTimes times;
    double free_s = 0;  // when it will have done what it was sent
    double work_s = 0;  // lately, in seconds of base_s_
    std::uint64_t under_way = 0;
  };
  static constexpr double kRebase_s = 64 * kHalfLife_s;

  State& at(WorkerId worker);
  double weight(double now_s);
  static double busy(const Estimate& one);
  Estimate estimate(const WorkerTimes& times, WorkerId worker, const Depths& depths, std::uint32_t tokens,
                    std::uint32_t of_peers) const;
  void score(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers, double now_s);

  std::uint32_t page_tokens_;
  std::vector<State> states_;
  double base_s_ = 0;  // work is halved every kHalfLife_s: a second of work weighs more the later it is done
  std::vector<Estimate> ranked_;
};

}  // namespace mainstem
