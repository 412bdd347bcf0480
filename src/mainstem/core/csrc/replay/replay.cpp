#include "replay/replay.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

namespace mainstem {

namespace {

Bytes key_of(Blocks blocks) {
  return {reinterpret_cast<const std::uint8_t*>(blocks.data()), blocks.size_bytes()};
}

std::uint64_t whole_seconds(float from, double to) {
  return static_cast<std::uint64_t>(std::max(0.0, to - double{from}));
}

}  // namespace

Replica::Replica(Tree* tree, const std::vector<std::uint64_t>& capacities, double ttl_s, Evict evict)
    : tree_(tree), evict_(std::move(evict)), ttl_s_(ttl_s) {
  require(tree->page_bytes() == sizeof(std::uint64_t), "page size in bytes", tree->page_bytes(), "8: one block");
  require(tree->rows().size() == 1 && tree->one_id_a_page(0) && tree->rows()[0].leaf_only(), "components",
          tree->rows().size(), "full attention only");
  require(capacities.size() == tree->tiers(), "capacities", capacities.size(), "one for each tier of the tree");
  require(ttl_s >= 0, "ttl_s is a number", 0, "0 or more seconds");
  for (const std::uint64_t capacity : capacities)
    tiers_.emplace_back().capacity = capacity;
  for (Tier& tier : tiers_)
    if (ttl_s_ < kNoTtl) tier.links.push_back({0, -1, -1, -1});
}

void Replica::report_to(Changes* changes, std::uint32_t replica) {
  changes_ = changes;
  number_ = replica;
}

void Replica::serve(double now_s, Blocks blocks, std::int32_t* hits) {
  expire(now_s);
  const auto n = static_cast<std::uint32_t>(blocks.size());
  now_ += n;
  now_s_ = now_s;
  note_visit();
  const MatchResult match = tree_->match("", key_of(blocks), false);
  look(match, n);
  for (std::uint32_t tier = 0; tier < tiers(); ++tier)
    store(match, blocks, tier);
  count(match.pages + match.host_pages, n, hits);
  for (std::uint32_t tier = 0; tier < tiers(); ++tier)
    trim(tier);
  if (ttl_s_ < kNoTtl) recent_.emplace_back(now_s, now_);
}

void Replica::note_visit() {
  if (visits_.size() >= max_visits_) forget_visits();
  visits_.push_back({now_, static_cast<float>(now_s_)});
}

// Keeps only the visits that a page refers to. Runs often enough that visits use little memory compared to the pages,
// and rarely enough that reading all pages costs little per visit.
void Replica::forget_visits() {
  constexpr std::uint32_t kGone = ~std::uint32_t{0};
  std::vector<std::uint32_t> numbers(visits_.size(), kGone);  // the new number of each
  std::size_t pages = 0;
  for (const Tier& tier : tiers_) {
    for (const Stamp& stamp : tier.stamps)
      numbers[stamp.born] = numbers[stamp.used] = 0;
    pages += tier.stamps.size();
  }
  Array<Visit> kept;
  for (std::size_t i = 0; i < visits_.size(); ++i) {
    if (numbers[i] == kGone) continue;
    numbers[i] = static_cast<std::uint32_t>(kept.size());
    kept.push_back(visits_[i]);
  }
  for (Tier& tier : tiers_)
    for (Stamp& stamp : tier.stamps)
      stamp = {numbers[stamp.born], numbers[stamp.used]};
  visits_.swap(kept);
  max_visits_ = visits_.size() + std::max({visits_.size(), pages / 4, kFewVisits});
}

// Finds the pages that each tier has of the match; -1 where it lacks one. A tier always has a prefix of a path.
void Replica::look(const MatchResult& match, std::size_t n) {
  const std::uint32_t found = match.pages + match.host_pages;
  for (std::uint32_t t = 0; t < tiers(); ++t) {
    Tier& tier = tiers_[t];
    tier.path.assign(n, -1);
    if (found) tree_->copy_ids(match.host_node, 0, t, 0, tier.path.data());
    const auto end = std::find(tier.path.begin(), tier.path.begin() + found, -1);
    tier.held = static_cast<std::uint32_t>(end - tier.path.begin());
  }
}

// On the device the match is known to end at `match.node`; on other tiers an insertion starts from the root.
void Replica::store(const MatchResult& match, Blocks blocks, std::uint32_t t) {
  Tier& tier = tiers_[t];
  const auto visit = static_cast<std::uint32_t>(visits_.size() - 1);
  for (std::uint32_t i = 0; i < tier.held; ++i)
    tier.stamp(tier.path[i]).used = visit;
  for (std::size_t i = tier.held; i < blocks.size(); ++i)
    tier.path[i] = take(&tier);
  if (tier.held < blocks.size()) {
    const std::size_t begin = t == 0 ? match.pages : 0;
    const IdSpan ids = IdSpan(tier.path).subspan(begin);
    const InsertResult stored =
        tree_->insert("", t == 0 ? match.node : 0, {key_of(blocks.subspan(begin)), {&ids, 1}}, 0, t, true);
    assert(stored.pages == blocks.size());
  }
  if (changes_) report_arrivals(t, blocks);
  if (!tier.links.empty()) note_use(&tier, blocks);
}

void Replica::report_arrivals(std::uint32_t t, Blocks blocks) {
  Tier& tier = tiers_[t];
  tier.names.resize(std::max(tier.names.size(), tier.stamps.size()), 0);
  std::uint64_t name = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    name = path_name(name, blocks[i]);
    if (i < tier.held) continue;
    tier.names[static_cast<std::size_t>(tier.path[i])] = name;
    changes_->add({name, number_, static_cast<std::uint8_t>(t), true});
  }
}

void Replica::count(std::uint32_t found, std::uint32_t n, std::int32_t* hits) {
  std::uint32_t best = 0;
  for (std::uint32_t t = 0; t < tiers(); ++t) {
    Tier& tier = tiers_[t];
    const std::uint32_t above = std::exchange(best, std::max(best, tier.held));
    hits[t] = static_cast<std::int32_t>(best - above);
    tier.totals.hits += best - above;
    tier.totals.loaded += found - best;
    tier.totals.written += (n - found) + (best - tier.held);
  }
}

void Replica::trim(std::uint32_t t) {
  Tier& tier = tiers_[t];
  const std::uint64_t present = tree_->counts(0, t).present;
  if (present <= tier.capacity) return;
  const Ids freed = evict_(present - tier.capacity, t);
  require(freed.size() == present - tier.capacity, "pages evicted", freed.size(), "as many as requested");
  for (const std::int32_t page : freed) {
    const Stamp& stamp = tier.stamp(page);
    const Visit &born = visits_[stamp.born], &used = visits_[stamp.used];
    tier.totals.age.add(now_ - born.at);
    tier.totals.idle.add(now_ - used.at);
    tier.totals.age_s.add(whole_seconds(born.at_s, now_s_));
    tier.totals.idle_s.add(whole_seconds(used.at_s, now_s_));
    retire(t, page);
  }
  tier.totals.evicted += freed.size();
}

std::int32_t Replica::take(Tier* tier) const {
  const auto visit = static_cast<std::uint32_t>(visits_.size() - 1);
  if (tier->free.empty()) {
    tier->stamps.push_back({visit, visit});
    return static_cast<std::int32_t>(tier->stamps.size() - 1);
  }
  const std::int32_t page = tier->free.back();
  tier->free.pop_back();
  tier->stamp(page) = {visit, visit};
  return page;
}

void Replica::retire(std::uint32_t t, std::int32_t page) {
  Tier& tier = tiers_[t];
  tier.free.push_back(page);
  if (changes_)
    changes_->add({tier.names[static_cast<std::size_t>(page)], number_, static_cast<std::uint8_t>(t), false});
  if (tier.links.empty()) return;
  tier.unlink(page);
  tier.link(page).newer = tier.link(page).older = page;
}

std::size_t Replica::bytes() const {
  std::size_t total = recent_.size() * sizeof(recent_[0]) + visits_.bytes();
  for (const Tier& tier : tiers_)
    total += tier.stamps.bytes() + tier.names.bytes() + tier.links.capacity() * sizeof(Link) +
             (tier.free.capacity() + tier.path.capacity()) * sizeof(std::int32_t);
  return total;
}

// ---------------------------------------------------------------- time to live

// Makes the pages of a request the most recently used, its end first: the least recently used page is always a leaf.
void Replica::note_use(Tier* tier, Blocks blocks) const {
  const std::size_t known = tier->links.size();
  for (std::size_t i = known; i < tier->stamps.size() + 1; ++i) {
    const auto page = static_cast<std::int32_t>(i) - 1;
    tier->links.push_back({0, -1, page, page});
  }
  Link& ends = tier->link(-1);
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const std::int32_t page = tier->path[i];
    tier->unlink(page);
    tier->link(page) = {blocks[i], i ? tier->path[i - 1] : -1, -1, ends.older};
    tier->link(ends.older).newer = page;
    ends.older = page;
  }
}

bool Replica::expired(Tier& tier, std::int32_t page) const {
  return page >= 0 && now_ - visits_[tier.stamp(page).used].at >= now_ - expired_at_;
}

void Replica::expire(double now_s) {
  if (ttl_s_ == kNoTtl) return;
  for (; !recent_.empty() && now_s - recent_.front().first > ttl_s_; recent_.pop_front()) {
    expired_at_ = recent_.front().second;
    any_expired_ = true;
  }
  for (std::uint32_t t = tiers(); any_expired_ && t-- > 0;)
    while (expired(tiers_[t], tiers_[t].links[0].newer))
      expire_run(t);
  any_expired_ = false;
}

// Expires the leaf that was used least recently, together with the expired pages above it.
void Replica::expire_run(std::uint32_t t) {
  Tier& tier = tiers_[t];
  const std::int32_t leaf = tier.link(-1).newer;
  std::vector<std::uint64_t> blocks;
  for (std::int32_t page = leaf; page >= 0; page = tier.link(page).parent)
    blocks.push_back(tier.link(page).block);
  std::reverse(blocks.begin(), blocks.end());
  std::uint64_t run = 1;
  for (std::int32_t page = leaf;
       tier.link(page).newer == tier.link(page).parent && expired(tier, tier.link(page).parent); ++run)
    page = tier.link(page).parent;

  auto depth = static_cast<std::uint32_t>(blocks.size());
  while (run > 0) {
    const Handle node = tree_->locate("", key_of(blocks), depth);
    const std::uint64_t pages = std::min<std::uint64_t>(run, depth - tree_->start(node));
    for (const std::int32_t page : tree_->drop(node, pages, t)) {
      require(expired(tier, page), "page expired", static_cast<std::uint64_t>(page), "the least recently used one");
      retire(t, page);
    }
    tier.totals.expired += pages;
    depth -= static_cast<std::uint32_t>(pages);
    run -= pages;
  }
}

// ---------------------------------------------------------------- replicas

Replay::Replay(std::vector<Replica> replicas, Router router, std::uint32_t parts)
    : replicas_(std::move(replicas)), router_(std::move(router)), changes_(parts) {
  require(parts > 0, "parts", parts, "1 or more");
  for (std::uint32_t i = 0; router_.looks_at_blocks() && i < replicas_.size(); ++i)
    replicas_[i].report_to(&changes_[part(i)], i);
}

void Replay::begin(double now_s) {
  if (!router_.looks_at_blocks() || !replicas_.front().expires()) return;  // a replica expires what it has as it serves
  for (Replica& replica : replicas_)
    replica.expire(now_s);
  for (std::uint32_t i = 0; i < parts(); ++i)
    learn(i);
}

void Replay::serve(std::uint32_t part, const Served& window) {
  const std::uint32_t tiers = replicas_.front().tiers();
  for (std::size_t i = 0; i < window.replicas.size(); ++i) {
    const auto replica = static_cast<std::uint32_t>(window.replicas[i]);
    if (this->part(replica) != part) continue;
    const Blocks blocks = window.blocks.subspan(window.offsets[i], window.offsets[i + 1] - window.offsets[i]);
    replicas_[replica].serve(window.times_s[i], blocks, window.hits + i * tiers);
  }
}

void Replay::learn(std::uint32_t part) {
  if (!router_.looks_at_blocks()) return;
  for (std::size_t shard = part; shard < Changes::kShards; shard += parts())
    for (Changes& changes : changes_)
      holders_.apply(shard, &changes.of(shard));
}

Choice Replay::serve_one(double now_s, std::uint64_t tokens, Blocks blocks, std::uint32_t stored, std::int32_t* hits) {
  begin(now_s);
  const Choice choice = route(now_s, tokens, blocks, stored);
  replicas_[choice.replica].serve(now_s, blocks, hits);
  for (std::uint32_t i = 0; i < parts(); ++i)
    learn(i);
  return choice;
}

std::size_t Replay::bytes() const {
  std::size_t total = holders_.bytes();
  for (const Replica& replica : replicas_)
    total += replica.bytes();
  return total;
}

}  // namespace mainstem
