// Random requests to the replay: trees of one to three tiers, with and without a time to live, several replicas. After
// each request the tree is sound, and every tier holds what it was given and did not lose, within its capacity. No
// policy beats the optimum.
#include <memory>
#include <numeric>

#include "random_operations.h"
#include "replay/optimum.h"
#include "replay/replay.h"
#include "support.h"

namespace mainstem {

namespace {

using Prompt = std::vector<std::uint64_t>;

const std::vector<Component> kFull{{Kind::full}};
constexpr std::uint64_t kEndless = 1u << 20;

struct Shape {
  std::vector<std::uint64_t> capacities;
  double ttl_s;
  std::string policy;
};

Replica::Evict by_order(Tree* tree) {
  return [tree](std::uint64_t pages, std::uint32_t tier) { return std::move(tree->evict(pages, 0, tier)[0]); };
}

Prompt some_prompt(Choices& choose, const std::vector<Prompt>& before) {
  if (!before.empty() && choose.one_in(4)) return choose.of(before);
  Prompt prompt;
  if (!before.empty() && choose.one_in(2)) {
    prompt = choose.of(before);
    prompt.resize(choose.below(static_cast<std::uint32_t>(prompt.size()) + 1));
  }
  for (std::uint32_t more = choose.below(6); more > 0; --more)
    prompt.push_back(choose.below(3));
  return prompt;
}

std::vector<Prompt> some_prompts(Choices& choose, std::uint32_t n) {
  std::vector<Prompt> prompts;
  for (std::uint32_t i = 0; i < n; ++i)
    prompts.push_back(some_prompt(choose, prompts));
  return prompts;
}

// Hits of all requests, by one cache.
std::int64_t serve_all(const Shape& shape, const std::vector<Prompt>& prompts, Choices& choose) {
  Tree tree(8, 1, kFull, static_cast<std::uint32_t>(shape.capacities.size()), shape.policy, choose.below(1000));
  Replica replica(&tree, shape.capacities, shape.ttl_s, by_order(&tree));
  std::int64_t all = 0;
  double now_s = 0;
  for (const Prompt& prompt : prompts) {
    now_s += choose.below(3);
    replica.expire(now_s);
    const auto* const key = reinterpret_cast<const std::uint8_t*>(prompt.data());
    const PeekResult reach = tree.peek("", {key, prompt.size() * sizeof(std::uint64_t)}, false);
    const std::uint32_t known = reach.pages + reach.host_pages;
    std::vector<std::int32_t> hits(replica.tiers());
    replica.serve(now_s, prompt, hits.data());
    const std::int64_t found = std::accumulate(hits.begin(), hits.end(), std::int64_t{0});
    expect_equal(found, known, "blocks found");
    all += found;
    tree.check();
    for (std::uint32_t tier = 0; tier < replica.tiers(); ++tier) {
      const TierTotals& totals = replica.totals(tier);
      const std::uint64_t present = tree.counts(0, tier).present;
      expect(present <= shape.capacities[tier], "a tier stays within its capacity");
      expect_equal(present, totals.written + totals.loaded - totals.evicted - totals.expired, "blocks of a tier");
      const auto& ages = totals.age.counts;
      expect_equal(std::accumulate(ages.begin(), ages.end(), std::uint64_t{0}), totals.evicted, "ages");
    }
    expect(replica.bytes() > 0 || replica.totals(0).written == 0, "memory is counted");
  }
  return all;
}

void beside_the_optimum(const std::vector<Prompt>& prompts, Choices& choose) {
  Optimum optimum;
  for (const Prompt& prompt : prompts)
    optimum.add(prompt);
  thrown<BadValue>("run before the end", [&] { optimum.run(1, nullptr); });
  optimum.finish();
  expect_equal(optimum.requests(), prompts.size(), "requests");
  std::vector<std::int32_t> hits(prompts.size());
  const auto best = [&](std::uint64_t capacity) {
    optimum.run(capacity, hits.data());
    return std::accumulate(hits.begin(), hits.end(), std::int64_t{0});
  };
  for (const std::uint64_t capacity : {1u, 3u, 10u})
    for (const char* policy : {"lru", "lfu", "fifo"})
      expect(serve_all({{capacity}, kNoTtl, policy}, prompts, choose) <= best(capacity), "the optimum is beaten");
  expect_equal(serve_all({{kEndless}, kNoTtl, "lru"}, prompts, choose), best(kEndless), "hits of an endless cache");
}

void by_routing(const std::vector<Prompt>& prompts, Choices& choose, Routing routing) {
  std::vector<std::unique_ptr<Tree>> trees;
  std::vector<Replica> replicas;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    Tree* tree = trees.emplace_back(std::make_unique<Tree>(8, 1, kFull, 1, "lru", seed)).get();
    replicas.emplace_back(tree, std::vector<std::uint64_t>{5}, 9, by_order(tree));
  }
  Replay replay(std::move(replicas), Router(routing, 3, 4, {1e-4, 1e-9, {0, 1e-6}, {}, LoadTime{0, 1e-5}}), 2);
  double now_s = 0;
  for (const Prompt& prompt : prompts) {
    std::int32_t hits = 0;
    now_s += choose.below(20);
    expect(replay.serve_one(now_s, prompt.size(), prompt, choose.below(3), &hits).replica < 3, "a replica");
    expect(hits >= 0 && static_cast<std::size_t>(hits) <= prompt.size(), "hits");
  }
  for (const auto& tree : trees)
    tree->check();
}

void refusals() {
  Tree tree(8, 1, kFull, 1, "lru", 1), wide(8, 2, kFull, 1, "lru", 1);
  Tree two(8, 1, {{Kind::full}, {Kind::state}}, 1, "lru", 1);
  const auto make = [](Tree* of, std::vector<std::uint64_t> sizes, double ttl_s) {
    return thrown<BadValue>("a replica", [&] { Replica(of, sizes, ttl_s, by_order(of)); });
  };
  make(&wide, {1}, kNoTtl);
  make(&two, {1}, kNoTtl);
  make(&tree, {1, 2}, kNoTtl);
  make(&tree, {1}, -1);
  Replica lazy(&tree, {1}, kNoTtl, [](std::uint64_t, std::uint32_t) { return Ids{}; });
  thrown<BadValue>("too little evicted", [&] {
    std::int32_t hits = 0;
    lazy.serve(0, Prompt{1, 2}, &hits);
  });
}

}  // namespace

void random_replay(std::uint64_t seed, std::uint32_t operations) {
  Choices choose(seed);
  const std::vector<Prompt> prompts = some_prompts(choose, operations);
  for (const double ttl_s : {kNoTtl, 0.0, 4.0, 30.0})
    for (const char* policy : {"lru", "lfu", "mru"})
      for (const std::vector<std::uint64_t>& sizes :
           {std::vector<std::uint64_t>{1}, {7}, {2, 6}, {3, 9, 27}, {kEndless}})
        serve_all({sizes, ttl_s, policy}, prompts, choose);
  beside_the_optimum(prompts, choose);
  for (const Routing routing : {Routing::round_robin, Routing::prefix, Routing::hash})
    by_routing(prompts, choose, routing);
  refusals();
}

}  // namespace mainstem
