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

std::uint32_t clamped(std::uint64_t tokens) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, ~std::uint32_t{0}));
}

}  // namespace

Routing parse_routing(const std::string& name) {
  for (const auto& [known, routing] : kNames)
    if (name == known) return routing;
  throw BadValue{"routing", name, "round-robin, two-choices, hash, consistent-hash, prefix or cost"};
}

Router::Router(Routing routing, std::uint32_t replicas, std::uint32_t block_tokens, const WorkerTimes& times)
    : routing_(routing),
      block_tokens_(block_tokens),
      times_(times),
      ranking_(block_tokens),
      replicas_(replicas),
      loads_(replicas) {
  require(replicas > 0 && replicas <= Holder::kMost, "replicas", replicas, "1 to 8192");
  require(block_tokens > 0, "block_tokens", block_tokens, "1 or more");
  std::iota(replicas_.begin(), replicas_.end(), WorkerId{0});
  for (const WorkerId replica : replicas_)
    ranking_.set_times(replica, times);
  for (std::vector<std::uint32_t>& pages : depths_.pages)
    pages.resize(replicas);
}

bool Router::looks_at_blocks() const {
  return loads_.size() > 1 && (times_.peer || routing_ == Routing::prefix || routing_ == Routing::cost);
}

Choice Router::route(double now_s, std::uint64_t tokens, Blocks blocks, std::uint32_t stored, Holders* holders) {
  if (looks_at_blocks()) look(blocks, stored, *holders);
  Choice choice{choose(now_s, tokens, blocks)};
  if (times_.peer && loads_.size() > 1 && pulls(choice.replica, tokens)) {
    choice.peer = deepest_[draw(served_ + 1, static_cast<std::uint32_t>(deepest_.size()))].replica();
    choice.peer_reach = deepest_reach_;
  }
  note(now_s, tokens, choice.replica, holders);
  return choice;
}

std::uint32_t Router::choose(double now_s, std::uint64_t tokens, Blocks blocks) {
  const auto n = static_cast<std::uint32_t>(loads_.size());
  if (n == 1) return 0;
  if (routing_ == Routing::cost) return ranking_.best(depths_, clamped(tokens), replicas_, now_s);
  if (routing_ == Routing::round_robin || (blocks.empty() && routing_ != Routing::two_choices))
    return static_cast<std::uint32_t>(served_ % n);
  switch (routing_) {
    case Routing::hash:
      return static_cast<std::uint32_t>(fold(blocks[0], kOdd) % n);
    case Routing::consistent_hash:
      return jump(fold(blocks[0], kOdd), n);
    case Routing::prefix:
      return choose_by_prefix(now_s, blocks.size());
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
void Router::look(Blocks blocks, std::uint32_t stored, const Holders& holders) {
  auto& [device, host, storage] = depths_.pages;  // a replica's own tiers below the device count as its host
  for (const std::uint32_t replica : found_)
    device[replica] = host[replica] = 0;
  storage.assign(storage.size(), stored);
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
      const std::uint32_t replica = holder.replica();
      if (host[replica] == 0) {
        host[replica] = depth;
        storage[replica] = std::max(stored, depth);
        found_.push_back(replica);
      }
      if (device[replica] == 0 && (holder.tiers() & 1)) device[replica] = depth;
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
  const std::vector<std::uint32_t>& reach = depths_.pages[static_cast<std::size_t>(Medium::host)];
  const auto better = [&](std::uint32_t a, std::uint32_t b) {
    if (reach[a] != reach[b]) return reach[a] > reach[b];
    return loads_[a] != loads_[b] ? loads_[a] < loads_[b] : a < b;
  };
  const auto n = static_cast<std::uint32_t>(loads_.size());
  std::uint32_t best = n;
  for (const std::uint32_t replica : found_)
    if (reach[replica] * kWorth >= blocks && loads_[replica] <= limit && (best == n || better(replica, best)))
      best = replica;
  if (best < n) return best;
  return static_cast<std::uint32_t>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
}

// Whether the replica gets what a peer has of the request sooner than it computes that.
bool Router::pulls(std::uint32_t replica, std::uint64_t tokens) const {
  const std::uint32_t own = depths_.pages[static_cast<std::size_t>(Medium::host)][replica];
  if (deepest_reach_ <= own) return false;
  const double all = static_cast<double>(tokens), block = block_tokens_;
  const auto rest_s = [&](std::uint32_t blocks) {
    const double known = std::max(0.0, std::min(blocks * block, all - 1));
    return times_.compute_s(all - known, known);
  };
  return (deepest_reach_ - own) * block * times_.peer->token_s <= rest_s(own) - rest_s(deepest_reach_);
}

void Router::note(double now_s, std::uint64_t tokens, std::uint32_t replica, Holders* holders) {
  const double added = static_cast<double>(tokens) * scale(now_s);
  loads_[replica] += added;
  sum_ += added;
  ++served_;
  tokens_ += tokens;
  if (routing_ != Routing::cost || loads_.size() == 1) return;
  ranking_.sent(replica, depths_, clamped(tokens), now_s);
  for (std::size_t i = depths_.pages[0][replica]; i < names_.size(); ++i)
    holders->add({names_[i], replica, 0, true});
}

// Returns the weight of a token that is sent now among the loads.
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
