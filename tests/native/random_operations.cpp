// The native tests of the core, except those that run out of memory.
//
//   random_operations SEEDS OPERATIONS            the cases, then random operations on trees, caches and tiers
//   random_operations SEEDS OPERATIONS --threads  the same seeds from several threads at once, each with its own tree,
//                                                 and several threads that read one tree
#include "random_operations.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <thread>

#include "cases.h"
#include "support.h"

namespace mainstem {

namespace {

constexpr unsigned kThreads = 4;

void in_threads(const std::function<void(unsigned)>& work) {
  std::vector<std::string> failures(kThreads);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      try {
        work(i);
      } catch (const Failure& failure) {
        failures[i] = failure.what;
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw Failure{failure};
}

}  // namespace

// Const functions may be called from several threads at once.
void random_peeks(std::uint64_t seed, std::uint32_t operations) {
  Tree tree(4, 2, {{Kind::full}}, 1, "lru", seed);
  Choices choose(seed);
  std::int32_t id = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string key = some_key(choose, 4, 2, 6);
    Ids ids(key.size() / tree.page_bytes());
    for (std::int32_t& one : ids)
      one = id++;
    const IdSpan span(ids);
    tree.insert("", 0, {bytes_of(key), {&span, 1}}, 0, 0, true);
  }
  const std::size_t nodes = tree.size();
  in_threads([&](unsigned thread) {
    Choices own(seed + thread);
    for (std::uint32_t i = 0; i < operations; ++i) {
      const std::string key = some_key(own, 4, 2, 6);
      const PeekResult found = tree.peek("", bytes_of(key), true);
      expect(std::size_t{found.pages} * tree.page_bytes() <= key.size(), "pages peeked");
      expect_equal(tree.counts(0, 0).locked, 0, "pages locked");
      expect_equal(tree.size(), nodes, "nodes");
      if (i % 64 == 0) tree.check();
    }
  });
}

namespace {

void run_threads(std::uint64_t seeds, std::uint32_t operations) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    in_threads([&](unsigned thread) {
      random_tree(seed * kThreads + thread, operations);
      random_cache(seed * kThreads + thread, operations);
      random_components(seed * kThreads + thread, operations);
      random_tiers(seed * kThreads + thread, operations);
      random_replay(seed * kThreads + thread, operations);
      random_routing(seed * kThreads + thread, operations);
    });
    random_peeks(seed, operations);
  }
}

void run(std::uint64_t seeds, std::uint32_t operations) {
  run_cases();
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    random_tree(seed, operations);
    random_cache(seed, operations);
    random_components(seed, operations);
    random_tiers(seed, operations);
    random_replay(seed, operations);
    random_routing(seed, operations);
  }
}

}  // namespace

}  // namespace mainstem

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SEEDS OPERATIONS [--threads]\n", argv[0]);
    return 2;
  }
  const auto seeds = static_cast<std::uint64_t>(std::atoll(argv[1]));
  const auto operations = static_cast<std::uint32_t>(std::atoi(argv[2]));
  try {
    if (argc > 3 && std::string_view(argv[3]) == "--threads")
      mainstem::run_threads(seeds, operations);
    else
      mainstem::run(seeds, operations);
  } catch (const mainstem::Failure& failure) {
    std::printf("%s\n", failure.what.c_str());
    return 1;
  }
  std::printf("%llu seeds of %u operations passed\n", static_cast<unsigned long long>(seeds), operations);
  return 0;
}
