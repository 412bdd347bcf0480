#include "cache.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace mainstem {

Table::Memory Table::copy(std::size_t room) const {
  Memory copy = std::make_shared_for_overwrite<std::int32_t[]>(room);
  if (size_) std::memcpy(copy.get(), memory_.get(), size_ * sizeof(std::int32_t));
  return copy;
}

void Table::move_to(std::size_t room) {
  memory_ = copy(room);
  room_ = room;
}

// ---------------------------------------------------------------- cache

void Cache::make_room(std::uint64_t n) {
  take_back();
  while (pool.owned(Owner::free) < n) {
    const std::uint64_t free = pool.owned(Owner::free);
    const CellCounts counts = tree.counts(0, 0);
    const std::uint64_t evictable = counts.present - counts.locked;
    if (n - free > evictable) throw NoPages{n, free, evictable, pool.total()};
    if (evict) {
      evict(n - free);
      if (pool.owned(Owner::free) <= free) throw NoPages{n, free, evictable, pool.total()};
    } else {
      pool.move(tree.evict(n - free, 0, 0)[0], Owner::cached, Owner::free);
    }
  }
}

void Cache::give_back(Handle node, IdSpan pages) {
  tree.unlock(node, 0);
  pool.move(pages, Owner::privately, Owner::free);
  --counters.leases;
}

void Cache::take_back() {
  for (std::size_t at = abandoned_.size(); at-- > 0;) {
    if (abandoned_[at].load) continue;  // pages that are being written cannot be anybody else's yet
    const Abandoned left = std::exchange(abandoned_[at], std::move(abandoned_.back()));
    abandoned_.pop_back();
    tree.unlock(left.donor, 0);
    if (left.host_node) tree.unlock(left.host_node, 1);
    give_back(left.node, left.table.from(left.owned));
  }
}

void Cache::end_load(std::uint64_t load) {
  for (Abandoned& left : abandoned_)
    if (left.load == load) left.load = 0;
  take_back();
}

void Cache::touched(Handle node) noexcept {
  if (tree.tiers() == 1 || node == 0 || touched_.size() >= kMostTouched) return;
  if (!touched_.empty() && touched_.back() == node) return;
  try {
    touched_.push_back(node);
  } catch (const std::bad_alloc&) {  // it is only not copied down
  }
}

// ---------------------------------------------------------------- lease

Lease::Lease(Cache& cache, std::string_view ns, std::int32_t priority, Bytes key, std::uint64_t most, bool inside,
             const CheckRest& check_rest)
    : cache_(cache), ns_(ns), priority_(priority), length_(key.size() / cache.tree.symbol_bytes()) {
  cache.take_back();
  cache.expect_lease();
  MatchResult match;
  if (cache.enabled)
    match = cache.tree.match(ns, key.first(most * cache.tree.symbol_bytes()), inside, check_rest);
  else if (check_rest)
    check_rest(0);
  const Bytes rest = key.subspan(std::size_t{match.pages} * cache.tree.page_bytes());
  key_.assign(rest.begin(), rest.end());
  table_.reserve((length_ + cache.tree.page_size() - 1) / cache.tree.page_size());
  cache.tree.lock(match.node, 0);
  if (match.host_pages) {
    try {
      cache.tree.lock(match.host_node, 1);
    } catch (...) {
      cache.tree.unlock(match.node, 0);
      throw;
    }
    host_node_ = match.host_node;
    host_pages_ = match.host_pages;
  }
  // Nothing below can fail.
  node_ = match.node;
  owned_ = match.pages;
  if (node_) cache.tree.copy_ids(node_, 0, 0, 0, table_.extend(owned_));
  inside_ = match.partial;
  source_ = match.partial_id;
  donor_ = match.partial_node;
  hit_ = reserved_ = published();
  ++cache.counters.leases;
  cache.touched(match.host_pages ? match.host_node : match.node);
}

Lease::~Lease() {
  if (!closed_) cache_.abandon({node_, copying_ ? donor_ : 0, host_node_, load_, std::move(table_), owned_});
}

std::optional<PageCopy> Lease::begin_copy() {
  require_open();
  if (inside_ == 0 || copying_ || table_.size() != owned_ || published() != hit_) return {};
  // Neither the eviction for the new page nor the code that copies may free the source.
  cache_.tree.lock(donor_, 0);
  try {
    cache_.make_room(1);
    require_open();  // that may have run anybody's code
    table_.reserve(table_.size() + 1);
    std::int32_t page;
    cache_.pool.allocate(1, &page);
    *table_.extend(1) = page;
    copying_ = true;
    return PageCopy{source_, page, inside_};
  } catch (const NoPages&) {
    ++cache_.counters.partial_missed;
    cache_.tree.unlock(donor_, 0);
    return {};
  } catch (...) {
    cache_.tree.unlock(donor_, 0);
    throw;
  }
}

void Lease::end_copy(bool copied) {
  if (!copying_) return;
  copying_ = false;
  cache_.tree.unlock(donor_, 0);
  if (copied) {
    hit_ += inside_;
    reserved_ = hit_;
  } else {
    cache_.pool.move(table_.from(owned_), Owner::privately, Owner::free);
    table_.drop_back(1);
  }
  inside_ = 0;
}

PageLoad Lease::begin_load() {
  require_open();
  require(host_pages_ && !load_ && table_.size() == owned_ && published() == hit_, "lease", host_pages_,
          "one with pages on the host, before anything is reserved");
  PageLoad load{0, Ids(host_pages_), Ids(host_pages_)};
  cache_.make_room(host_pages_);
  require_open();  // that may have run anybody's code
  table_.reserve(table_.size() + host_pages_);
  cache_.tree.copy_ids(host_node_, 0, 1, owned_, load.source.data());
  cache_.pool.allocate(host_pages_, table_.extend(host_pages_));
  std::copy_n(table_.from(owned_).data(), host_pages_, load.target.data());
  reserved_ = published() + loadable();
  inside_ = 0;  // what the host has is longer
  load.id = load_ = ++cache_.loads_;
  return load;
}

void Lease::end_load(bool arrived) {
  require_open();
  if (!load_) return;
  load_ = 0;
  const std::uint64_t positions = loadable();
  forget_host();
  if (!arrived) return;  // the pages stay, to be computed
  hit_ += positions;
  cache_.counters.host_hit += positions;
  if (counted_) cache_.counters.hit += positions;
  publish(hit_);
}

void Lease::forget_host() {
  if (host_node_) cache_.tree.unlock(host_node_, 1);
  host_node_ = 0;
  host_pages_ = 0;
}

// A lease counts as a question when it gets its first pages: who found no room will ask again.
void Lease::count_once() {
  if (counted_) return;
  counted_ = true;
  cache_.counters.queried += length_;
  cache_.counters.hit += hit_;
  cache_.counters.partial_hit += hit_ - published();
}

std::uint64_t Lease::missing_pages(std::uint64_t n) const {
  const std::uint32_t page_size = cache_.tree.page_size();
  const std::uint64_t pages = (reserved_ + n + page_size - 1) / page_size;
  return pages - std::min<std::uint64_t>(pages, table_.size());
}

void Lease::reserve(std::uint64_t n) {
  require_open();
  end_copy(false);
  while (missing_pages(n) > cache_.pool.owned(Owner::free)) {
    cache_.make_room(missing_pages(n));
    require_open();  // that may have run anybody's code
  }
  if (const std::uint64_t pages = missing_pages(n)) {
    table_.reserve(table_.size() + pages);
    cache_.pool.allocate(pages, table_.extend(pages));
  }
  reserved_ += n;
  count_once();
}

void Lease::append(Bytes symbols) {
  require_open();
  key_.insert(key_.end(), symbols.begin(), symbols.end());
  length_ += symbols.size() / cache_.tree.symbol_bytes();
  appended_ = appended_ || !symbols.empty();
}

void Lease::publish(std::uint64_t upto) {
  require_open();
  assert(upto <= publishable());
  const std::uint64_t pages = upto / cache_.tree.page_size();
  if (pages <= owned_ || !cache_.enabled) return;
  const IdSpan ids = table_.part(owned_, pages);
  const Bytes key = Bytes(key_).subspan(key_begin_, ids.size() * cache_.tree.page_bytes());
  Table::Memory spare;  // for a table that names the tree's pages instead, before anything changes
  if (cache_.tree.knows(ns_, node_, key)) spare = table_.copy(table_.room());
  // The key is this lease's own, so its node lies on it: the prefix need not be read again.
  const InsertResult added = cache_.tree.insert(ns_, node_, {key, {&ids, 1}}, priority_, 0, true);
  if (added.pages == owned_) return;
  cache_.tree.move_lock(node_, added.node, 0);
  node_ = added.node;
  cache_.touched(node_);
  take_over(added.pages, added.existing, std::move(spare));
}

// Pages up to `end` are the tree's now. Of those before `existing` it may have had others, which take the place of
// ours.
void Lease::take_over(std::uint32_t end, std::uint32_t existing, Table::Memory ours) {
  if (existing <= owned_) {
    cache_.pool.move(table_.part(owned_, end), Owner::privately, Owner::cached);
  } else {
    table_.exchange(ours);
    std::int32_t* theirs = table_.memory().get() + owned_;
    cache_.tree.copy_ids(node_, 0, 0, owned_, theirs);
    for (std::size_t page = owned_; page < end; ++page, ++theirs) {
      const bool duplicate = ours[page] != *theirs;
      cache_.pool.move({&ours[page], 1}, Owner::privately, duplicate ? Owner::free : Owner::cached);
      cache_.counters.duplicate_pages += duplicate;
    }
  }
  forget_key(end - owned_);
  owned_ = end;
}

// The tree has these pages' symbols now.
void Lease::forget_key(std::uint32_t pages) {
  key_begin_ += std::size_t{pages} * cache_.tree.page_bytes();
  if (key_begin_ * 2 < key_.size()) return;
  key_.erase(key_.begin(), key_.begin() + static_cast<std::ptrdiff_t>(key_begin_));
  key_begin_ = 0;
}

// Without `upto`: all that is reserved, less the last position if something was appended, since no forward has computed
// the KV of a token that was only just sampled.
void Lease::finish(std::optional<std::uint64_t> upto) {
  if (closed_) return;
  const std::uint64_t computed = std::min(publishable(), length_ - appended_);
  if (upto.value_or(computed) > published()) publish(upto.value_or(computed));
  abort();
}

void Lease::abort() {
  if (closed_) return;
  end_copy(false);
  closed_ = true;
  if (load_) {
    cache_.abandon({node_, 0, host_node_, load_, std::move(table_), owned_});
    return;
  }
  forget_host();
  cache_.give_back(node_, table_.from(owned_));
}

}  // namespace mainstem
