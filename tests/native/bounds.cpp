// Bounds of the core that only thousands of events, or hours, reach: what is halved, fades or is forgotten. Each is
// compared with a slow model, just before its bound, at it, and far beyond. It includes headers alone, so that it is
// compiled in a second: `bounds [case]`.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "eviction/expected.h"
#include "eviction/policies/reuse_index.h"
#include "structure/node.h"

namespace mainstem {
namespace {

constexpr Account kOne = 1, kOther = 2;

struct Failure {
  std::string what;
};

void expect_near(double found, double expected, const std::string& what) {
  if (std::abs(found - expected) > 1e-9 * std::max(1.0, std::abs(expected)))
    throw Failure{what + " is " + std::to_string(found) + ", not " + std::to_string(expected)};
}

// An account's bets as `Ledger` documents them.
struct Bets {
  double asked = 0, lost = 0, settled = 0, unhappily = 0, open = 0;

  void settle(double loss) {
    --open;
    lost = std::max(lost + loss, -10 * 0.0015 * asked);
    settled += 1;
    unhappily += loss > 0;
    if (settled >= 16384) settled /= 2, unhappily /= 2;
  }
  double room() const { return (0.0015 * asked - lost) * (settled + 32) / (unhappily + 32) - open; }
};

// Two thousand half-lives of bets: first all are lost, then none is.
void old_bets_count_half_after_16384() {
  Ledger ledger;
  Bets model;
  ledger.asked(kOne, 1 << 30);
  model.asked = 1 << 30;
  for (std::uint64_t bet = 0; bet < (1u << 24); ++bet) {
    const double loss = bet < 20000 ? 1 : 0;
    ledger.bet(bet, kOne, 0);
    ++model.open;
    if (bet % 512 == 0 || (bet > 16380 && bet < 16390)) expect_near(ledger.room(kOne), model.room(), "room");
    ledger.lose(bet, loss);
    model.settle(loss);
  }
  expect_near(ledger.room(kOne), model.room(), "room in the end");
  expect_near(model.unhappily, 0, "what counts of the lost ones");
  expect_near(ledger.room(kOther), 0, "room of another account");
}

void gains_count_up_to_ten_allowances() {
  for (const std::uint64_t won : {14999, 15000, 15001, 15000000}) {
    Ledger ledger;
    ledger.asked(kOne, 1000000);  // 1,500 may be lost
    for (std::uint64_t bet = 0; bet < won; ++bet) {
      ledger.bet(bet, kOne, 0);
      ledger.win(1);
    }
    double settled = 0;
    for (std::uint64_t bet = 0; bet < won; ++bet)
      settled = settled + 1 >= 16384 ? (settled + 1) / 2 : settled + 1;
    const double gained = static_cast<double>(std::min<std::uint64_t>(won, 15000));
    expect_near(ledger.room(kOne), (1500 + gained) * (settled + 32) / 32, "room after gains");
  }
}

void so_many_pages_that_went_are_remembered() {
  constexpr std::uint64_t kMost = 1 << 22;
  Ledger ledger;
  ledger.asked(kOne, std::uint64_t{1} << 40);
  const double all = ledger.room(kOne);
  for (std::uint64_t page = 1; page <= kMost; ++page)
    ledger.bet(page, kOne, 0);
  expect_near(all - ledger.room(kOne), kMost, "bets at the bound");
  for (std::uint64_t page = kMost + 1; page <= kMost + 3; ++page)
    ledger.bet(page, kOne, 0);
  if (ledger.lose(3, 1)) throw Failure{"the oldest are still remembered"};
  if (!ledger.lose(4, 1)) throw Failure{"more than the oldest are forgotten"};
  if (!ledger.lose(kMost + 3, 1)) throw Failure{"the newest is forgotten"};
}

// What is not announced is taken to be twice as far away as it was idle, at the pace of the latest 4,096 ticks or so.
void the_pace_of_ticks_fades() {
  Array<Node> nodes;
  nodes.resize(1);
  std::uint64_t tick = 0;
  Expected expected(nodes, tick);
  expected.reserve(1);
  double now = 0, seconds = 0, ticks = 0;
  expected.note_time(now = 1);
  for (int step = 0; step < 100000; ++step) {
    const double takes = step < 5000 ? 10 : 0.5;
    if (step) {  // the first time has no ticks before it
      seconds += takes;
      ticks += 1;
      if (ticks > 4096) seconds /= 2, ticks /= 2;
    }
    tick += 1;
    expected.note_time(now += takes);
    if (step) expect_near(expected.wait(0), 2 * static_cast<double>(tick) * seconds / ticks, "wait");
  }
  expect_near(seconds / ticks, 0.5, "the pace of long ago");
}

// What was learned of reuse fades by a hundredth with each lesson: after a thousand half-lives of 69 lessons an index
// is what it was before anything was seen.
void lessons_fade() {
  const auto equal = [](const ReuseIndex& one, const ReuseIndex& other, double most, const std::string& what) {
    for (int kind = 0; kind < ReuseIndex::kKinds; ++kind)
      for (int bucket = 0; bucket < ages::kBuckets; ++bucket)
        if (std::abs(one.at(kind, bucket) - other.at(kind, bucket)) > most * other.at(kind, bucket))
          throw Failure{what + ", kind " + std::to_string(kind) + ", age " + std::to_string(bucket)};
  };
  const auto seen = [](int times) {
    ReuseIndex index;
    for (int each = 0; each < times; ++each) {
      index.reused(3, 40);
      for (int page = 0; page < 5; ++page)
        index.lived(3, 0, 500), index.lived(20, 0, 5000);
    }
    return index;
  };
  // 0.99 of 10,000 counts 9,900; 0.99^69 of them counts 4,998.
  for (const auto& [lessons, left] : {std::pair{1, 10000}, {2, 9900}, {3, 9801}, {70, 4998}}) {
    ReuseIndex faded = seen(10000), fresh = seen(left);
    for (int lesson = 0; lesson < lessons; ++lesson)
      faded.learn(1);
    fresh.learn(1);
    equal(faded, fresh, 5e-3, "after " + std::to_string(lessons) + " lessons");
  }
  ReuseIndex faded = seen(10000), fresh;
  for (int lesson = 0; lesson < 69000; ++lesson)
    faded.learn(1);
  fresh.learn(1);
  equal(faded, fresh, 0, "after a thousand half-lives");
}

void generations_begin_anew_and_never_with_0() {
  constexpr std::uint32_t kMost = (1u << 26) - 1;
  Node node{};
  for (const auto& [now, next] : {std::pair{0u, 1u}, {1u, 2u}, {kMost - 1, kMost}, {kMost, 1u}}) {
    node.generation = now;
    expect_near(node.next_generation(), next, "the next generation");
    node.outdate();
    expect_near(node.generation, next, "the generation");
  }
}

const std::vector<std::pair<std::string, std::function<void()>>> kCases = {
    {"old_bets_count_half_after_16384", old_bets_count_half_after_16384},
    {"gains_count_up_to_ten_allowances", gains_count_up_to_ten_allowances},
    {"so_many_pages_that_went_are_remembered", so_many_pages_that_went_are_remembered},
    {"the_pace_of_ticks_fades", the_pace_of_ticks_fades},
    {"lessons_fade", lessons_fade},
    {"generations_begin_anew_and_never_with_0", generations_begin_anew_and_never_with_0},
};

}  // namespace
}  // namespace mainstem

int main(int count, char** arguments) {
  int failed = 0;
  for (const auto& [name, run] : mainstem::kCases) {
    if (count > 1 && name != arguments[1]) continue;
    try {
      run();
    } catch (const mainstem::Failure& failure) {
      std::printf("%s: %s\n", name.c_str(), failure.what.c_str());
      failed = 1;
    }
  }
  return failed;
}
