#include "routing/ranking.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mainstem {

namespace {

double compute_s(const WorkerTimes& times, double tokens, double before) {
  return tokens * (times.token_s + times.attended_s * (before + tokens / 2));
}

double load_s(const LoadTime& time, double tokens) {
  return tokens > 0 ? time.latency_s + time.token_s * tokens : 0;
}

bool good(const LoadTime& time) {
  return time.latency_s >= 0 && time.token_s >= 0 && std::isfinite(time.latency_s + time.token_s);
}

}  // namespace

double Ranking::State::work(double now_s) const {
  return work_s * std::exp2((work_at - now_s) / kHalfLife_s);
}

Ranking::State& Ranking::at(WorkerId worker) {
  require(index_->known(worker), "worker", worker, "a worker that was added and not dropped");
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
  of.free_s = std::max(of.free_s, now_s + compute_s(of.times, tokens, 0));
}

void Ranking::forget(WorkerId worker) {
  at(worker) = {};
}

// ---------------------------------------------------------------- estimates

// Tokens that another worker has on its device or host, from the beginning.
std::uint32_t Ranking::on_peers(WorkerId but) const {
  const std::vector<std::uint32_t>& pages = depths_.pages[static_cast<std::size_t>(Medium::host)];
  std::uint32_t most = 0;
  for (WorkerId worker = 0; worker < pages.size(); ++worker)
    if (worker != but) most = std::max(most, pages[worker]);
  return most;
}

// The last token is computed in any case.
Estimate Ranking::estimate(WorkerId worker, std::uint32_t tokens, std::uint32_t of_peers, double now_s) {
  const State& of = at(worker);
  const std::uint32_t most = tokens ? tokens - 1 : 0;
  const auto known = [&](std::uint32_t pages) {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(most, std::uint64_t{pages} * index_->page_tokens()));
  };
  const auto on = [&](Medium place) { return known(depths_.pages[static_cast<std::size_t>(place)][worker]); };
  const std::uint32_t device = on(Medium::device), host = on(Medium::host), storage = on(Medium::storage);
  const auto left_s = [&](std::uint32_t from) { return compute_s(of.times, tokens - from, from); };
  Estimate best{worker, 0, 0, left_s(device), device, of.work(now_s)};
  const auto consider = [&](std::uint32_t cached, double seconds) {
    if (cached > device && seconds + left_s(cached) < best.service_s)
      best = {worker, 0, 0, seconds + left_s(cached), cached, best.work_s};
  };
  const double from_host_s = load_s(of.times.host, host - device);
  consider(host, from_host_s);
  consider(storage, load_s(of.times.storage, storage - host) + load_s(of.times.host, storage - device));
  if (of.times.peer && known(of_peers) > host) {
    const std::uint32_t peer = known(of_peers);
    consider(peer, load_s(*of.times.peer, peer - host) + load_s(of.times.host, peer - device));
  }
  best.seconds = std::max(0.0, of.free_s - now_s) + best.service_s;
  return best;
}

// The share of the time lately that a worker was in use.
double Ranking::busy(const Estimate& one) {
  return std::min(1.0, one.work_s * std::numbers::ln2 / kHalfLife_s);
}

const std::vector<Estimate>& Ranking::rank(Digest space, std::span<const std::uint32_t> tokens,
                                           std::span<const WorkerId> workers, std::optional<WorkerId> stay,
                                           double now_s) {
  index_->expire(now_s);
  index_->match(space, tokens, &depths_);
  ranked_.clear();
  const auto length = static_cast<std::uint32_t>(tokens.size());
  std::uint32_t best_pages = 0, others_pages = 0;  // the most on the host of any worker, and of any other
  WorkerId best_worker = 0;
  const std::vector<std::uint32_t>& pages = depths_.pages[static_cast<std::size_t>(Medium::host)];
  for (WorkerId worker = 0; worker < pages.size(); ++worker) {
    if (pages[worker] > best_pages) {
      others_pages = best_pages;
      best_pages = pages[worker];
      best_worker = worker;
    } else {
      others_pages = std::max(others_pages, pages[worker]);
    }
  }
  for (const WorkerId worker : workers)
    ranked_.push_back(estimate(worker, length, worker == best_worker ? others_pages : best_pages, now_s));
  double in_use = 0;
  for (const Estimate& one : ranked_)
    in_use += busy(one) / static_cast<double>(workers.size());
  const double others = kOthers * std::min(1.0, in_use / kInUse);
  for (Estimate& one : ranked_)
    one.cost_s = one.seconds + (others + busy(one)) * one.service_s;
  const auto sooner = [&](const Estimate& one, const Estimate& other) {
    if (one.cost_s != other.cost_s) return one.cost_s < other.cost_s;
    return one.work_s != other.work_s ? one.work_s < other.work_s : one.worker < other.worker;
  };
  std::sort(ranked_.begin(), ranked_.end(), sooner);
  if (!stay) return ranked_;
  const auto before =
      std::find_if(ranked_.begin(), ranked_.end(), [&](const Estimate& one) { return one.worker == *stay; });
  if (before == ranked_.end()) return ranked_;
  const double more_s = kStay_s + kStay * compute_s(states_[*stay].times, length, 0);
  if (before->cost_s <= ranked_.front().cost_s + more_s) std::rotate(ranked_.begin(), before, before + 1);
  return ranked_;
}

// ---------------------------------------------------------------- what was sent

void Ranking::sent(WorkerId worker, Digest space, std::span<const std::uint32_t> tokens, double now_s) {
  State& to = at(worker);
  index_->match(space, tokens, &depths_);
  const double service_s =
      estimate(worker, static_cast<std::uint32_t>(tokens.size()), on_peers(worker), now_s).service_s;
  index_->expect(worker, space, tokens, now_s);
  to.free_s = std::max(to.free_s, now_s) + service_s;
  to.work_s = to.work(now_s) + service_s;
  to.work_at = now_s;
  ++to.under_way;
}

void Ranking::ended(WorkerId worker, double now_s) {
  State& of = at(worker);
  if (of.under_way) --of.under_way;
  if (!of.under_way) of.free_s = std::min(of.free_s, now_s);
}

}  // namespace mainstem
