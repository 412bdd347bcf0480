#include "replay/router.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "structure/children.h"
#include "structure/errors.h"

namespace mainstem {

namespace {

constexpr std::array<std::pair<const char*, Routing>, 6> kNames{{{"round-robin", Routing::round_robin},
                                                                 {"two-choices", Routing::two_choices},
                                                                 {"hash", Routing::hash},
                                                                 {"consistent-hash", Routing::consistent_hash},
                                                                 {"prefix", Routing::prefix},
                                                                 {"cost", Routing::cost}}};

constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;

// The bucket of a key, of n: with one bucket more, only the keys that it gets move. Lamping and Veach 2014, "A fast,
// minimal memory, consistent hash algorithm".
std::uint32_t jump(std::uint64_t key, std::uint32_t n) {
  std::int64_t bucket = -1, next = 0;
  while (next < n) {
    bucket = next;
    key = key * 2862933555777941757ull + 1;
    next = static_cast<std::int64_t>(static_cast<double>(bucket + 1) *
                                     (static_cast<double>(1ll << 31) / static_cast<double>((key >> 33) + 1)));
  }
  return static_cast<std::uint32_t>(bucket);
}

}  // namespace

Routing parse_routing(const std::string& name) {
  for (const auto& [known, routing] : kNames)
    if (name == known) return routing;
  throw BadValue{"routing", name, "round-robin, two-choices, hash, consistent-hash, prefix or cost"};
}

Router::Router(Routing routing, std::uint32_t replicas, bool peers, const RouterCosts& costs)
    : routing_(routing),
      peers_(peers),
      costs_(costs),
      loads_(replicas),
      free_at_s_(replicas),
      expected_s_(replicas),
      reaches_(replicas) {
  require(replicas > 0 && replicas <= Holder::kMost, "replicas", replicas, "1 to 8192");
  require(routing != Routing::cost || costs.token_s > 0, "token_s", 0, "above 0 for routing by cost");
  require(costs.token_s >= 0 && costs.pair_s >= 0 && costs.below_s >= 0 && costs.peer_s >= 0 && costs.block_tokens > 0,
          "costs", 0, "0 or more");
}

bool Router::looks_at_blocks() const {
  return loads_.size() > 1 && (peers_ || routing_ == Routing::prefix || routing_ == Routing::cost);
}

Choice Router::route(double now_s, std::uint64_t tokens, Blocks blocks, const Holders& holders) {
  if (looks_at_blocks()) look(blocks, holders);
  Choice choice{choose(now_s, tokens, blocks)};
  if (peers_ && loads_.size() > 1 && pulls(choice.replica, tokens)) {
    choice.peer = deepest_[draw(served_ + 1, static_cast<std::uint32_t>(deepest_.size()))].replica();
    choice.peer_reach = deepest_reach_;
  }
  note(now_s, tokens, choice.replica);
  return choice;
}

std::uint32_t Router::choose(double now_s, std::uint64_t tokens, Blocks blocks) {
  const auto n = static_cast<std::uint32_t>(loads_.size());
  if (n == 1) return 0;
  if (routing_ == Routing::round_robin || (blocks.empty() && routing_ != Routing::two_choices))
    return static_cast<std::uint32_t>(served_ % n);
  switch (routing_) {
    case Routing::hash:
      return static_cast<std::uint32_t>(fold(blocks[0], kOdd) % n);
    case Routing::consistent_hash:
      return jump(fold(blocks[0], kOdd), n);
    case Routing::prefix:
      return choose_by_prefix(now_s, blocks.size());
    case Routing::cost:
      return choose_by_cost(now_s, tokens);
    default:
      break;
  }
  const std::uint32_t one = draw(2 * served_, n), other = (one + 1 + draw(2 * served_ + 1, n - 1)) % n;
  return loads_[other] < loads_[one] ? other : one;
}

// A number below `below`, from the number of a request: the same in each run.
std::uint32_t Router::draw(std::uint64_t number, std::uint32_t below) const {
  const std::uint64_t bits = fold(fold(number + 1, kOdd) ^ kOdd, 0xD1342543DE82EF95ull);
  return static_cast<std::uint32_t>((bits >> 32) * below >> 32);
}

// Walks from the last block that anybody holds to the first: those that hold a block hold all blocks before it, so the
// first time that a replica is met is its reach. Equal lists say nothing new.
void Router::look(Blocks blocks, const Holders& holders) {
  for (const std::uint32_t replica : found_)
    reaches_[replica] = {};
  found_.clear();
  deepest_.clear();
  deepest_reach_ = 0;
  names_.clear();
  for (const std::uint64_t block : blocks)
    names_.push_back(path_name(names_.empty() ? 0 : names_.back(), block));
  Holder one;
  std::size_t low = 0, high = blocks.size();  // blocks that somebody holds
  while (low < high) {
    const std::size_t middle = (low + high + 1) / 2;
    holders.of(names_[middle - 1], &one).empty() ? high = middle - 1 : low = middle;
  }
  deepest_reach_ = static_cast<std::uint32_t>(low);
  std::span<const Holder> before;
  Holder kept;
  for (std::uint32_t depth = deepest_reach_; depth > 0; --depth) {
    const std::span<const Holder> here = holders.of(names_[depth - 1], &one);
    if (std::equal(here.begin(), here.end(), before.begin(), before.end())) continue;
    for (const Holder holder : here) {
      Reach& reach = reaches_[holder.replica()];
      if (reach.any == 0) {
        reach.any = depth;
        found_.push_back(holder.replica());
      }
      if (reach.device == 0 && (holder.tiers() & 1)) reach.device = depth;
    }
    if (depth == deepest_reach_) deepest_.assign(here.begin(), here.end());
    kept = here[0];
    before = here.size() == 1 ? std::span<const Holder>(&kept, 1) : here;
  }
}

// A prefix counts if it covers half of the request, and busy replicas are skipped: otherwise a prefix that all prompts
// share would send them all to one replica. Of equals, the least loaded gets it.
std::uint32_t Router::choose_by_prefix(double now_s, std::size_t blocks) {
  const double weight = scale(now_s), mean = sum_ / static_cast<double>(loads_.size());
  const double request = static_cast<double>(tokens_) / static_cast<double>(std::max<std::uint64_t>(served_, 1));
  const double limit = std::max(kBusy * mean, mean + kBusyRequests * request * weight);
  const auto better = [&](std::uint32_t a, std::uint32_t b) {
    if (reaches_[a].any != reaches_[b].any) return reaches_[a].any > reaches_[b].any;
    return loads_[a] != loads_[b] ? loads_[a] < loads_[b] : a < b;
  };
  const auto n = static_cast<std::uint32_t>(loads_.size());
  std::uint32_t best = n;
  for (const std::uint32_t replica : found_)
    if (reaches_[replica].any * kWorth >= blocks && loads_[replica] <= limit && (best == n || better(replica, best)))
      best = replica;
  if (best < n) return best;
  return static_cast<std::uint32_t>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
}

// Of those that are nearly as soon as the soonest, the least loaded gets it. Otherwise, a short prefix that all prompts
// share would keep them among the few replicas that have it, as long as these have time.
std::uint32_t Router::choose_by_cost(double now_s, std::uint64_t tokens) {
  const auto n = static_cast<std::uint32_t>(loads_.size());
  double without_s = -1, least = std::numeric_limits<double>::infinity();  // at a replica that holds nothing
  for (std::uint32_t i = 0; i < n; ++i) {
    if (reaches_[i].any == 0 && without_s < 0) without_s = service_s(i, tokens);
    expected_s_[i] = std::max(0.0, free_at_s_[i] - now_s) + (reaches_[i].any ? service_s(i, tokens) : without_s);
    least = std::min(least, expected_s_[i]);
  }
  std::uint32_t best = n;
  for (std::uint32_t i = 0; i < n; ++i)
    if (expected_s_[i] <= kNear * least && (best == n || loads_[i] < loads_[best])) best = i;
  return best;
}

double Router::compute_s(std::uint64_t tokens, std::uint32_t blocks) const {
  if (tokens == 0) return 0;
  const double all = static_cast<double>(tokens);
  const double known = std::min(blocks * costs_.block_tokens, all - 1), fresh = all - known;
  return costs_.token_s * fresh + costs_.pair_s * (fresh * known + fresh * (fresh + 1) / 2);
}

bool Router::pulls(std::uint32_t replica, std::uint64_t tokens) const {
  const std::uint32_t own = reaches_[replica].any;
  if (deepest_reach_ <= own) return false;
  if (costs_.token_s == 0) return true;
  return (deepest_reach_ - own) * costs_.peer_s <= compute_s(tokens, own) - compute_s(tokens, deepest_reach_);
}

// Seconds from when the replica is free to the first token.
double Router::service_s(std::uint32_t replica, std::uint64_t tokens) const {
  const Reach& reach = reaches_[replica];
  const double below = (reach.any - reach.device) * costs_.below_s;
  if (!peers_ || !pulls(replica, tokens)) return below + compute_s(tokens, reach.any);
  return below + (deepest_reach_ - reach.any) * costs_.peer_s + compute_s(tokens, deepest_reach_);
}

void Router::note(double now_s, std::uint64_t tokens, std::uint32_t replica) {
  const double added = static_cast<double>(tokens) * scale(now_s);
  loads_[replica] += added;
  sum_ += added;
  ++served_;
  tokens_ += tokens;
  if (routing_ != Routing::cost) return;
  free_at_s_[replica] = std::max(now_s, free_at_s_[replica]) + service_s(replica, tokens);
}

// What a token of now weighs among the loads.
double Router::scale(double now_s) {
  if (now_s - base_s_ > kRebase_s) {
    const double factor = std::exp2((base_s_ - now_s) / kHalfLife_s);
    for (double& load : loads_)
      load *= factor;
    sum_ = std::accumulate(loads_.begin(), loads_.end(), 0.0);
    base_s_ = now_s;
  }
  return std::exp2((now_s - base_s_) / kHalfLife_s);
}

}  // namespace mainstem
