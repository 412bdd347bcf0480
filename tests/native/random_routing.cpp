// Random events of several workers to a routing index, beside a map of what each of them has. After each event the
// index is sound and finds what the map says; a full one finds less, and never more.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "random_operations.h"
#include "routing/index.h"
#include "routing/prefixes.h"
#include "routing/ranking.h"
#include "support.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kPage = 2;
constexpr std::uint64_t kEndless = 1u << 20;
constexpr double kExpect_s = 5;

using Tokens = std::vector<std::uint32_t>;
using Where = std::pair<std::uint32_t, Tokens>;  // a namespace and all tokens up to the end of a page

struct Has {
  Where where;
  std::set<Medium> media;
};

struct Known {  // of one worker
  std::map<std::uint64_t, Has> held;
  std::map<Where, double> expected;  // and when it was sent
  std::uint32_t store = 0;
};

// Few pages, or more than are looked up together.
std::uint32_t some_pages(Choices& choose) {
  return choose.below(choose.one_in(10) ? 80 : 6);
}

Tokens some_tokens(Choices& choose, std::uint32_t pages) {
  Tokens tokens;
  for (std::uint32_t i = 0; i < pages * kPage; ++i)
    tokens.push_back(choose.one_in(4) ? 1 : 0);
  return tokens;
}

// A worker's own name of a page: never 0.
std::uint64_t hash_of(WorkerId worker, const Where& where) {
  std::uint64_t hash = 1 + worker + 97 * where.first;
  for (const std::uint32_t token : where.second)
    hash = fold(hash ^ (token + 0x51ED2701), 0x9E3779B97F4A7C15ull) | 1;
  return hash;
}

class World {
 public:
  World(std::uint64_t seed, std::uint64_t capacity)
      : choose_(seed), full_(capacity < kEndless), index_({seed, ~seed}, kPage, capacity), ranking_(kPage) {}

  void step() {
    now_s_ += choose_.below(2);
    if (workers_.size() < 3 || choose_.one_in(200)) join();
    const std::uint32_t kind = choose_.below(20);
    if (kind < 9)
      store();
    else if (kind < 14)
      remove();
    else if (kind < 17)
      send();
    else if (kind == 17 && choose_.one_in(6))
      clear();
    else if (kind == 18 && choose_.one_in(20))
      leave();
    else
      odd();
    index_.check();
    look();
  }

  void join() {
    const WorkerId worker = index_.add();
    expect(!workers_.contains(worker), "a worker's number is its own");
    index_.expect_for(worker, kExpect_s);
    const std::uint32_t store = choose_.below(3);
    index_.share_store(worker, store);
    ranking_.set_times(worker, {1e-3, 1e-6, {0, 1e-5}, {1e-3, 1e-4}, LoadTime{1e-3, 1e-5}});
    workers_[worker].store = store;
  }

  std::size_t workers() const { return workers_.size(); }

 private:
  WorkerId some_worker() {
    auto at = workers_.begin();
    std::advance(at, choose_.below(static_cast<std::uint32_t>(workers_.size())));
    return at->first;
  }
  Digest space(std::uint32_t number) const {
    return index_.space({reinterpret_cast<const std::uint8_t*>(&number), number ? sizeof(number) : 0});
  }
  static Where up_to(std::uint32_t space, const Tokens& tokens, std::size_t pages) {
    return {space, Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(pages * kPage))};
  }

  void store() {
    const WorkerId worker = some_worker();
    const std::uint32_t ns = choose_.below(2), pages = 1 + some_pages(choose_);
    const Tokens tokens = some_tokens(choose_, pages);
    const auto medium = Medium{choose_.below(kMedia)};
    const std::size_t from = choose_.below(pages);
    Known& of = workers_[worker];
    std::optional<std::uint64_t> parent;
    if (from) parent = hash_of(worker, up_to(ns, tokens, from));
    std::vector<std::uint64_t> hashes;
    const bool orphan = from && !of.held.contains(*parent);
    for (std::size_t page = from + 1; page <= pages; ++page) {
      const Where where = up_to(ns, tokens, page);
      hashes.push_back(hash_of(worker, where));
      if (orphan) continue;
      Has& has = of.held[hashes.back()];
      has.where = where;
      has.media.insert(medium);
      if (!full_) of.expected.erase(where);  // a full index may not know the page that the event is about
    }
    const std::uint64_t before = index_.counts().orphans;
    index_.store(worker, medium, space(ns), parent, hashes, std::span(tokens).subspan(from * kPage));
    if (!full_) expect_equal(index_.counts().orphans - before, orphan ? pages - from : 0, "orphans");
  }

  void remove() {
    const WorkerId worker = some_worker();
    Known& of = workers_[worker];
    const auto medium = Medium{choose_.below(kMedia)};
    std::vector<std::uint64_t> hashes{choose_.below(1000)};  // nobody's
    for (const auto& [hash, has] : of.held)
      if (choose_.one_in(6)) hashes.push_back(hash);
    index_.remove(worker, medium, hashes);
    for (const std::uint64_t hash : hashes) {
      const auto at = of.held.find(hash);
      if (at == of.held.end() || !at->second.media.erase(medium)) continue;
      if (!full_) of.expected.erase(at->second.where);
      if (at->second.media.empty()) of.held.erase(at);
    }
  }

  void send() {
    const WorkerId worker = some_worker();
    Known& to = workers_[worker];
    const std::uint32_t ns = choose_.below(2), pages = some_pages(choose_);
    const Tokens tokens = some_tokens(choose_, pages);
    expire();
    Depths depths;
    index_.match(space(ns), tokens, &depths);
    ranking_.sent(worker, depths, static_cast<std::uint32_t>(tokens.size()), now_s_);
    index_.expect(worker, space(ns), tokens, now_s_);
    if (choose_.one_in(2)) ranking_.ended(worker, now_s_);
    if (choose_.one_in(4)) ranking_.set_queue(worker, choose_.below(100), now_s_);
    for (std::size_t page = 1; page <= pages; ++page) {
      const Where where = up_to(ns, tokens, page);
      const auto at = to.held.find(hash_of(worker, where));
      if (full_ || at == to.held.end() || !at->second.media.contains(Medium::device)) to.expected[where] = now_s_;
    }
  }

  void clear() {
    const WorkerId worker = some_worker();
    index_.clear(worker);
    workers_[worker].held.clear();
    workers_[worker].expected.clear();
  }

  void leave() {
    const WorkerId worker = some_worker();
    ranking_.forget(worker);
    index_.drop(worker);
    workers_.erase(worker);
    if (workers_.empty()) join();
  }

  // Events that make no sense change nothing.
  void odd() {
    const WorkerId worker = some_worker();
    const Known& of = workers_[worker];
    const IndexCounts before = index_.counts();
    const Tokens tokens = some_tokens(choose_, 1);
    const std::uint64_t other = 2;  // even: no page's hash
    index_.store(worker, Medium::device, space(0), std::nullopt, std::array{other, other + 2}, tokens);
    expect_equal(index_.counts().malformed, before.malformed + 1, "malformed events");
    if (full_ || of.held.empty()) return;
    const auto& [hash, has] = *of.held.begin();
    index_.store(worker, Medium::host, space(1 - has.where.first), hash, std::array{other}, tokens);
    expect_equal(index_.counts().malformed, before.malformed + 2, "pages that continue one of another namespace");
    const Tokens strange{7, 7};
    index_.store(worker, Medium::host, space(0), std::nullopt, std::array{hash}, strange);
    expect_equal(index_.counts().conflicts, before.conflicts + 1, "a hash of two pages");
    index_.store(worker, Medium::host, space(has.where.first), std::nullopt, std::array{other},
                 std::span(has.where.second).first(kPage));
    const bool there = of.held.contains(hash_of(worker, up_to(has.where.first, has.where.second, 1)));
    if (there)
      expect_equal(index_.counts().conflicts, before.conflicts + 2, "two hashes of a page");
    else
      index_.remove(worker, Medium::host, std::array{other});
    if (!there) workers_[worker].expected.erase(up_to(has.where.first, has.where.second, 1));
    index_.malformed(worker);
  }

  void expire() {
    index_.expire(now_s_);
    for (auto& [worker, of] : workers_)
      std::erase_if(of.expected, [&](const auto& one) { return one.second + kExpect_s <= now_s_; });
  }

  bool stored_by_any(std::uint32_t store, const Where& where) const {
    return std::any_of(workers_.begin(), workers_.end(), [&](const auto& one) {
      const auto at = one.second.held.find(hash_of(one.first, where));
      return one.second.store == store && at != one.second.held.end() && at->second.media.contains(Medium::storage);
    });
  }

  // Pages that the map says a worker has from the beginning, on these media.
  std::uint32_t depth(WorkerId worker, std::uint32_t ns, const Tokens& tokens, Medium lowest) const {
    const Known& of = workers_.at(worker);
    for (std::uint32_t page = 0; page < tokens.size() / kPage; ++page) {
      const Where where = up_to(ns, tokens, page + 1);
      const auto at = of.held.find(hash_of(worker, where));
      bool there = of.expected.contains(where);
      for (std::uint32_t medium = 0; medium <= static_cast<std::uint32_t>(lowest); ++medium)
        there |= at != of.held.end() && at->second.media.contains(Medium{medium});
      if (lowest == Medium::storage && of.store) there |= stored_by_any(of.store, where);
      if (!there) return page;
    }
    return static_cast<std::uint32_t>(tokens.size() / kPage);
  }

  void look() {
    expire();
    const std::uint32_t ns = choose_.below(2);
    Tokens tokens = some_tokens(choose_, some_pages(choose_));
    if (choose_.one_in(2)) tokens.push_back(0);  // not a whole page
    Depths found;
    index_.match(space(ns), tokens, &found);
    std::vector<WorkerId> all;
    for (const auto& [worker, of] : workers_) {
      all.push_back(worker);
      for (const Medium place : {Medium::device, Medium::host, Medium::storage}) {
        const std::uint32_t seen = found.pages[static_cast<std::size_t>(place)][worker];
        const std::uint32_t there = depth(worker, ns, tokens, place);
        if (full_)
          expect(seen <= there, "a full index finds no more than there is");
        else
          expect_equal(seen, there, "pages of a worker");
      }
    }
    const std::optional<WorkerId> stay = choose_.one_in(2) ? std::optional(choose_.below(5)) : std::nullopt;
    const auto length = static_cast<std::uint32_t>(tokens.size());
    const WorkerId best = ranking_.best(found, length, all, now_s_);
    const std::vector<Estimate>& ranked = ranking_.rank(found, length, all, stay, now_s_);
    expect(ranked.front().worker == best || ranked.front().worker == stay, "the best alone is the first of all");
    expect_equal(static_cast<std::int64_t>(ranked.size()), static_cast<std::int64_t>(all.size()), "workers ranked");
    for (std::size_t i = 1; i < ranked.size(); ++i)
      expect(ranked[i - 1].cost_s <= ranked[i].cost_s || ranked[i - 1].worker == stay, "the best first");
    for (const Estimate& one : ranked)
      expect(one.service_s <= one.seconds && one.seconds <= one.cost_s && one.cached <= tokens.size(), "an estimate");
  }

  Choices choose_;
  bool full_;
  RoutingIndex index_;
  Ranking ranking_;
  std::map<WorkerId, Known> workers_;
  double now_s_ = 0;
};

// Pages get the names that each of them gets alone, and no two prefixes the same one.
void names(std::uint64_t seed) {
  Choices choose(seed);
  for (std::uint32_t size = 1; size <= 9; ++size) {
    const PrefixDigests digests({seed, ~seed}, size), others({seed, seed}, size);
    const std::uint32_t first = choose.below(1000), pages = choose.below(70);
    Tokens tokens(std::size_t{pages} * size + choose.below(size));
    for (std::uint32_t& token : tokens)
      token = choose.below(2);
    std::vector<Digest> together(pages);
    digests.after({seed, 0}, first, tokens.data(), pages, together.data());
    PrefixNames more(digests, {seed, 0}, first, tokens);
    Digest before{seed, 0}, other;
    std::set<std::uint64_t> seen;
    for (std::uint32_t page = 0; page < pages; ++page) {
      Digest alone;
      digests.after(before, first + page, tokens.data() + std::size_t{page} * size, 1, &alone);
      expect(alone == together[page] && more.next() == alone, "a name does not depend on those made with it");
      before = alone;
      expect(seen.insert(alone.one).second && seen.insert(alone.two).second, "another prefix has another name");
      others.after(before, first + page, tokens.data() + std::size_t{page} * size, 1, &other);
      expect(!(other == together[std::min(page + 1, pages - 1)]), "another key gives other names");
    }
    expect(more.some().empty(), "only whole pages have names");
  }
}

void refusals() {
  thrown<BadValue>("pages without tokens", [] { RoutingIndex(SipKey{}, 0, 1); });
  thrown<BadValue>("no room", [] { RoutingIndex(SipKey{}, 1, 0); });
  RoutingIndex index(SipKey{1, 2}, 1, 100);
  Ranking ranking(1);
  thrown<BadValue>("a worker that is not there", [&] { index.clear(0); });
  const WorkerId worker = index.add();
  thrown<BadValue>("a store", [&] { index.share_store(worker, 1u << 12); });
  thrown<BadValue>("a negative time", [&] { ranking.set_times(worker, {-1, 0, {}, {}, {}}); });
  thrown<BadValue>("a negative queue", [&] { ranking.set_queue(worker, -1, 0); });
}

}  // namespace

void random_routing(std::uint64_t seed, std::uint32_t operations) {
  refusals();
  names(seed);
  for (const std::uint64_t capacity : {kEndless, std::uint64_t{40}, std::uint64_t{5}}) {
    World world(seed, capacity);
    for (std::uint32_t i = 0; i < operations; ++i)
      world.step();
  }
  World crowd(seed, kEndless);  // more workers than one word has bits
  while (crowd.workers() < 70)
    crowd.join();
  for (std::uint32_t i = 0; i < operations; ++i)
    crowd.step();
  while (crowd.workers() < 140)
    crowd.join();
  for (std::uint32_t i = 0; i < operations / 4; ++i)
    crowd.step();
}

}  // namespace mainstem
