// Ranking: which worker should get a request, by when each would send its first token, as far as is known.
//
//   cost     =  queue + (1 + others + busy) * service
//   service  =  load + compute, for the cheapest way to begin
//
//   ways to begin   use the device's pages | also the host's | also those in storage | also a peer's
//   compute         token_s * n + attended_s * n * (positions before + n / 2), as the engines estimate it
//   load            latency + s for each token
//   queue           work that was sent to the worker and cannot be done yet, at the speed that the worker reports
//   others          computing what another worker has makes later requests wait, and pushes pages out. `kOthers` if the
//                   workers were busy for `kInUse` of the recent time or more; 0 if they were idle: then nobody waits,
//                   and a request goes to the worker with the earliest first token
//   busy            the share of the recent time in which the worker was busy, so that equal workers get equal work
//
// If one worker cannot serve all requests for a prefix, another one computes it as soon as waiting costs more, and has
// it from then on. The caller passes the time and the pages that each worker has: the fleet's front knows them from
// events, a replay from its trees. Both use this ranking.
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

// How long a worker takes for a token.
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
  // A session stays with its worker if that costs at most this much more, plus this part of computing its whole prompt.
  static constexpr double kStay_s = 0.02, kStay = 0.1;

  explicit Ranking(std::uint32_t page_tokens) : page_tokens_(page_tokens) {}

  void set_times(WorkerId worker, const WorkerTimes& times);
  // The worker reports how many of the tokens that it was sent it has not computed yet.
  void set_queue(WorkerId worker, double tokens, double now_s);
  void forget(WorkerId worker);

  // Returns the workers, the best first. `depths`: pages of the prompt that each has. `stay`: the worker of the session
  // so far.
  const std::vector<Estimate>& rank(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers,
                                    std::optional<WorkerId> stay, double now_s);
  // The first of them, without the order of the others.
  WorkerId best(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers, double now_s);
  // A request goes to a worker.
  void sent(WorkerId worker, const Depths& depths, std::uint32_t tokens, double now_s);
  void ended(WorkerId worker, double now_s);
  // Throws Corrupt if a worker that is not known has a queue, times or work, which the next one would inherit.
  void check(const RoutingIndex& known) const;

 private:
  struct State {
    WorkerTimes times;
    double free_s = 0;  // when it will have done what it was sent
    double work_s = 0;  // lately, in seconds of base_s_
    std::uint64_t under_way = 0;
    bool operator==(const State&) const = default;
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
  double base_s_ = 0;  // recent work weighs more: instead of halving the old every kHalfLife_s, new work weighs double
  std::vector<Estimate> ranked_;
};

}  // namespace mainstem
