#include "routing/ranking.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mainstem {

namespace {

double load_s(const LoadTime& time, double tokens) {
  return tokens > 0 ? time.latency_s + time.token_s * tokens : 0;
}

bool good(const LoadTime& time) {
  return time.latency_s >= 0 && time.token_s >= 0 && std::isfinite(time.latency_s + time.token_s);
}

bool sooner(const Estimate& one, const Estimate& other) {
  if (one.cost_s != other.cost_s) return one.cost_s < other.cost_s;
  return one.work_s != other.work_s ? one.work_s < other.work_s : one.worker < other.worker;
}

const std::vector<std::uint32_t>& on_host(const Depths& depths) {
  return depths.pages[static_cast<std::size_t>(Medium::host)];
}

// The most pages that any worker has on its device or host. For one that has as many itself no peer has more.
std::uint32_t most_on_host(const Depths& depths) {
  std::uint32_t most = 0;
  for (const std::uint32_t pages : on_host(depths))
    most = std::max(most, pages);
  return most;
}

}  // namespace

Ranking::State& Ranking::at(WorkerId worker) {
  if (worker >= states_.size()) states_.resize(std::size_t{worker} + 1);
  return states_[worker];
}

void Ranking::set_times(WorkerId worker, const WorkerTimes& times) {
  const bool all = good({times.token_s, times.attended_s}) && good(times.host) && good(times.storage) &&
                   (!times.peer || good(*times.peer));
  require(all, "times", worker, "0 or more seconds");
  at(worker).times = times;
}

void Ranking::set_queue(WorkerId worker, double tokens, double now_s) {
  require(tokens >= 0, "queued tokens", worker, "0 or more");
  State& of = at(worker);
  of.free_s = std::max(of.free_s, now_s + of.times.compute_s(tokens, 0));
}

void Ranking::forget(WorkerId worker) {
  at(worker) = {};
}

// Returns the weight of a second of work that is done now; one done at base_s_ has the weight 1.
double Ranking::weight(double now_s) {
  if (now_s - base_s_ > kRebase_s) {
    for (State& state : states_)
      state.work_s *= std::exp2((base_s_ - now_s) / kHalfLife_s);
    base_s_ = now_s;
  }
  return std::exp2((now_s - base_s_) / kHalfLife_s);
}

// ---------------------------------------------------------------- estimates

// Estimates the service time alone, without queue and recent work. The last token is always computed.
Estimate Ranking::estimate(const WorkerTimes& times, WorkerId worker, const Depths& depths, std::uint32_t tokens,
                           std::uint32_t of_peers) const {
  const std::uint32_t most = tokens ? tokens - 1 : 0;
  const auto known = [&](std::uint32_t pages) {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(most, std::uint64_t{pages} * page_tokens_));
  };
  const auto on = [&](Medium place) { return known(depths.pages[static_cast<std::size_t>(place)][worker]); };
  const std::uint32_t device = on(Medium::device), host = on(Medium::host), storage = on(Medium::storage);
  const auto left_s = [&](std::uint32_t from) { return times.compute_s(tokens - from, from); };
  Estimate best{worker, 0, 0, left_s(device), device, 0};
  const auto consider = [&](std::uint32_t cached, double seconds) {
    if (cached <= device) return;
    seconds += left_s(cached);
    if (seconds >= best.service_s) return;
    best.service_s = seconds;
    best.cached = cached;
  };
  consider(host, load_s(times.host, host - device));
  consider(storage, load_s(times.storage, storage - host) + load_s(times.host, storage - device));
  if (times.peer && known(of_peers) > host) {
    const std::uint32_t peer = known(of_peers);
    consider(peer, load_s(*times.peer, peer - host) + load_s(times.host, peer - device));
  }
  return best;
}

// Returns the share of the recent time in which a worker was busy.
double Ranking::busy(const Estimate& one) {
  return std::min(1.0, one.work_s * std::numbers::ln2 / kHalfLife_s);
}

void Ranking::score(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers, double now_s) {
  ranked_.clear();
  const std::uint32_t of_peers = most_on_host(depths);
  const double of_now = 1 / weight(now_s);
  const std::vector<std::uint32_t>&host = on_host(depths), &storage = depths.pages[2];
  if (depths.pages[0].size() > states_.size()) states_.resize(depths.pages[0].size());
  double in_use = 0;
  std::optional<Estimate> cold;  // of a worker without any page: the same for all with equal times and the same store
  for (const WorkerId worker : workers) {
    const State& of = states_[worker];
    const bool is_cold = host[worker] == 0;
    Estimate& one = ranked_.emplace_back();
    if (is_cold && cold && storage[worker] == storage[cold->worker] && of.times == states_[cold->worker].times) {
      one = *cold;
      one.worker = worker;
    } else {
      one = estimate(of.times, worker, depths, tokens, of_peers);
      if (is_cold) cold = one;
    }
    one.seconds = std::max(0.0, of.free_s - now_s) + one.service_s;
    one.work_s = of.work_s * of_now;
    in_use += busy(one);
  }
  const double others = kOthers * std::min(1.0, in_use / (kInUse * static_cast<double>(workers.size())));
  for (Estimate& one : ranked_)
    one.cost_s = one.seconds + (others + busy(one)) * one.service_s;
}

const std::vector<Estimate>& Ranking::rank(const Depths& depths, std::uint32_t tokens,
                                           std::span<const WorkerId> workers, std::optional<WorkerId> stay,
                                           double now_s) {
  score(depths, tokens, workers, now_s);
  std::sort(ranked_.begin(), ranked_.end(), sooner);
  if (!stay) return ranked_;
  const auto before =
      std::find_if(ranked_.begin(), ranked_.end(), [&](const Estimate& one) { return one.worker == *stay; });
  if (before == ranked_.end()) return ranked_;
  const double more_s = kStay_s + kStay * at(*stay).times.compute_s(tokens, 0);
  if (before->cost_s <= ranked_.front().cost_s + more_s) std::rotate(ranked_.begin(), before, before + 1);
  return ranked_;
}

WorkerId Ranking::best(const Depths& depths, std::uint32_t tokens, std::span<const WorkerId> workers, double now_s) {
  score(depths, tokens, workers, now_s);
  return std::min_element(ranked_.begin(), ranked_.end(), sooner)->worker;
}

// ---------------------------------------------------------------- what was sent

void Ranking::sent(WorkerId worker, const Depths& depths, std::uint32_t tokens, double now_s) {
  State& to = at(worker);
  const double service_s = estimate(to.times, worker, depths, tokens, most_on_host(depths)).service_s;
  to.free_s = std::max(to.free_s, now_s) + service_s;
  to.work_s += service_s * weight(now_s);
  ++to.under_way;
}

void Ranking::ended(WorkerId worker, double now_s) {
  State& of = at(worker);
  if (of.under_way) --of.under_way;
  if (!of.under_way) of.free_s = std::min(of.free_s, now_s);
}

void Ranking::check(const RoutingIndex& known) const {
  for (WorkerId worker = 0; worker < states_.size(); ++worker) {
    const State& of = states_[worker];
    if (!known.known(worker) && of != State{}) throw Corrupt{"ranking: a worker that is gone has a queue or times"};
    if (!(of.work_s >= 0 && std::isfinite(of.work_s) && std::isfinite(of.free_s)))
      throw Corrupt{"ranking: the work of a worker is a number of seconds"};
  }
}

}  // namespace mainstem
