#include "cache.h"

#include <algorithm>
#include <array>
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

namespace {

const char* what(const Component& row) {
  if (row.kind == Kind::state) return "state slots";
  return row.kind == Kind::window ? "window pages" : "pages";
}

template <class Which>
std::vector<std::uint32_t> components_where(const std::vector<Component>& rows, Which which) {
  std::vector<std::uint32_t> found;
  for (std::uint32_t c = 0; c < rows.size(); ++c)
    if (which(rows[c])) found.push_back(c);
  return found;
}

}  // namespace

Cache::Cache(Tree& tree_, std::vector<Pool*> pools_, bool enabled_)
    : tree(tree_),
      pools(std::move(pools_)),
      enabled(enabled_),
      paged(components_where(tree.rows(), std::mem_fn(&Component::per_page))),
      windows(components_where(tree.rows(), std::mem_fn(&Component::begins_late))),
      states(components_where(tree.rows(), std::not_fn(&Component::per_page))) {
  require(pools.size() == tree.rows().size(), "pools", pools.size(), "one for each component");
  require(tree.rows()[0].per_page(), "components", 0, "first one with an id for each page");
  for (std::size_t c = 1; c < pools.size(); ++c)
    require(tree.rows()[c].kind != Kind::full, "components", c, "full attention first");
}

void Cache::make_room(std::uint64_t n, std::uint32_t component) {
  take_back();
  Pool& pool = *pools[component];
  while (pool.owned(Owner::free) < n) {
    const std::uint64_t free = pool.owned(Owner::free);
    const CellCounts counts = tree.counts(component, 0);
    const std::uint64_t evictable = counts.present - counts.locked;
    const NoPages none{n, free, evictable, pool.total(), what(tree.rows()[component])};
    if (n - free > evictable) throw none;
    if (evict) {
      evict(component, n - free);
      if (pool.owned(Owner::free) <= free) throw none;
    } else {
      const std::vector<Ids> freed = tree.evict(n - free, component, 0);
      for (std::size_t c = 0; c < freed.size(); ++c)
        pools[c]->move(freed[c], Owner::cached, Owner::free);
    }
  }
}

std::int32_t Cache::allocate_slot(std::uint32_t component) {
  std::int32_t slot;
  pools[component]->allocate(1, &slot);
  return slot;
}

void Cache::free(std::uint32_t component, IdSpan ids) {
  while (!ids.empty() && ids.front() < 0)
    ids = ids.subspan(1);
  pools[component]->move(ids, Owner::privately, Owner::free);
}

void Cache::release_held(Handle node, Holdings& held, std::size_t owned) {
  tree.refresh_use(node, 0);
  tree.unlock(node, 0);
  for (const std::uint32_t c : paged)
    if (held[c].table.size() > owned) free(c, held[c].table.from(owned));
  for (const std::uint32_t c : states) {
    Holding& own = held[c];
    free(c, {&own.state, 1});
    free(c, {&own.mark, 1});
  }
  --counters.leases;
}

void Cache::end_abandoned() {
  for (std::size_t at = abandoned_.size(); at-- > 0;) {
    if (abandoned_[at].load) continue;  // pages that are still written to must not be freed yet
    Abandoned left = std::exchange(abandoned_[at], std::move(abandoned_.back()));
    abandoned_.pop_back();
    tree.unlock(left.donor, 0);
    if (left.host_node) tree.unlock(left.host_node, 1);
    release_held(left.node, left.held, left.owned);
  }
}

void Cache::end_load(std::uint64_t load) {
  for (Abandoned& left : abandoned_)
    if (left.load == load) left.load = 0;
  take_back();
}

void Cache::touched(Handle node) noexcept {
  if (tree.tiers() == 1 || node == 0 || touched_.size() >= kMaxTouched) return;
  if (!touched_.empty() && touched_.back() == node) return;
  try {
    touched_.push_back(node);
  } catch (const std::bad_alloc&) {  // the only loss: it is not copied down
  }
}

// ---------------------------------------------------------------- lease

Lease::Lease(Cache& cache, std::string_view ns, std::int32_t priority, Bytes key, std::uint64_t limit, bool inside,
             const CheckRest& check_rest)
    : cache_(cache),
      ns_(ns),
      priority_(priority),
      held_(cache.pools.size()),
      length_(key.size() / cache.tree.symbol_bytes()) {
  cache.take_back();
  cache.expect_lease();
  MatchResult match;
  if (cache.enabled)
    match = cache.tree.match(ns, key.first(limit * cache.tree.symbol_bytes()), inside, check_rest);
  else if (check_rest)
    check_rest(0);
  std::uint32_t reach = match.reach_pages;  // not shortened by `limit`, which keeps images whole
  if (cache.enabled && held_.size() > 1 && limit + 1 < length_)
    reach = cache.tree.peek(ns, key.first((length_ - 1) * cache.tree.symbol_bytes()), false).reach_pages;
  const Bytes rest = key.subspan(std::size_t{match.pages} * cache.tree.page_bytes());
  key_.assign(rest.begin(), rest.end());
  const std::uint32_t pages = pages_of(length_);
  for (const std::uint32_t c : cache.paged)
    held_[c].table.reserve(pages);
  owned_ = match.pages;
  if (match.host_pages && !host_has(match)) match.host_pages = 0;
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
  if (node_) {
    for (const std::uint32_t c : cache.paged)
      cache.tree.copy_ids(node_, c, 0, 0, held_[c].table.extend(owned_));
    drop_before_windows();
  }
  inside_ = match.partial;
  source_ = match.partial_id;
  donor_ = match.partial_node;
  hit_ = reserved_ = published();
  reach_ = reach;
  ++cache.counters.leases;
  cache.touched(match.host_pages ? match.host_node : match.node);
  try {
    for (const std::uint32_t c : cache.states)
      take_state(c);
  } catch (...) {
    abort();
    throw;
  }
}

Lease::~Lease() {
  if (!closed_) cache_.abandon({node_, copying_ ? donor_ : 0, host_node_, load_, std::move(held_), owned_});
}

// ---- states

std::int32_t Lease::state() const {
  require_open();
  return cache_.states.empty() ? -1 : held_[cache_.states[0]].state;
}

// Allocates a slot with a copy of the tree's state at the end of the match. The tree's own state is never modified.
void Lease::take_state(std::uint32_t component) {
  cache_.make_room(1, component);
  require_open();  // that may have run user code
  held_[component].state = cache_.allocate_slot(component);
  if (node_) cache_.copy_state(state_at_node(component), held_[component].state);
}

std::int32_t Lease::state_at_node(std::uint32_t component) const {
  std::int32_t slot;
  cache_.tree.copy_ids(node_, component, 0, owned_ - 1, &slot);
  return slot;
}

bool Lease::checkpoint(std::uint64_t position, bool room) {
  require_open();
  const std::uint32_t page_size = cache_.tree.page_size();
  require(!load_, "position", position, "none while a state is in flight");
  require(position % page_size == 0, "position", position, "the end of a page");
  require(position >= std::max<std::uint64_t>(published(), 1), "position", position, "not before what is published");
  require(position <= publishable(), "position", position, "at most what is reserved, and what is known");
  if (!cache_.enabled) return false;
  bool all = true;
  for (const std::uint32_t c : cache_.states) {
    Holding& own = held_[c];
    if (own.mark < 0) {
      try {
        if (room) cache_.make_room(1, c);
        require_open();  // that may have run user code
        own.mark = cache_.allocate_slot(c);
      } catch (const NoPages&) {
        ++cache_.counters.checkpoints_missed;
        all = false;
        continue;
      }
    }
    own.mark_pages = static_cast<std::uint32_t>(position / page_size);
    try {
      cache_.copy_state(own.state, own.mark);
    } catch (...) {
      cache_.free(c, {&own.mark, 1});
      own.mark = -1;
      throw;
    }
  }
  return all;
}

// Hands the copy to the tree, or frees it if the tree already has one there.
void Lease::settle_mark(std::uint32_t component) {
  Holding& own = held_[component];
  const bool taken = state_at_node(component) == own.mark;
  cache_.pools[component]->move({&own.mark, 1}, Owner::privately, taken ? Owner::cached : Owner::free);
  own.mark = -1;
  if (!taken) return;
  ++cache_.counters.checkpoints;
  const std::uint32_t limit = cache_.tree.rows()[component].most_on_path;
  if (limit) cache_.pools[component]->move(cache_.tree.thin(node_, component, 0, limit), Owner::cached, Owner::free);
}

// ---- pages

std::optional<PageCopy> Lease::begin_copy() {
  require_open();
  Table& table = held_[0].table;
  if (inside_ == 0 || copying_ || table.size() != owned_ || published() != hit_) return {};
  // Neither the eviction for the new page nor the copying code may free the source.
  cache_.tree.lock(donor_, 0);
  try {
    cache_.make_room(1);
    require_open();  // that may have run user code
    cache_.allocate(1, 0, &table);
    copying_ = true;
    return PageCopy{source_, *table.from(owned_).data(), inside_};
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
    cache_.free(0, held_[0].table.from(owned_));
    held_[0].table.drop_back(1);
  }
  inside_ = 0;
}

// Returns the first page of a component that a load up to `end` copies.
std::uint32_t Lease::load_from(std::uint32_t component, std::uint32_t end) const {
  const Component& row = cache_.tree.rows()[component];
  return row.per_page() ? std::max(owned_, row.first_needed(end, cache_.tree.page_size())) : end - 1;
}

// Whether the host alone has everything that a load needs. With more than full attention a part may be on the device
// only.
bool Lease::host_has(const MatchResult& match) const {
  const std::uint32_t end = match.pages + match.host_pages;
  const bool mixed = held_.size() > 1 || slides(0);
  for (std::uint32_t c = 0; mixed && c < held_.size(); ++c)
    if (!cache_.tree.has(match.host_node, c, 1, load_from(c, end))) return false;
  return true;
}

PageLoad Lease::begin_load() {
  require_open();
  require(host_pages_ && !load_ && held_[0].table.size() == owned_ && published() == hit_, "lease", host_pages_,
          "one with pages on the host, before anything is reserved");
  const std::uint32_t end = owned_ + host_pages_;
  PageLoad load;
  for (std::uint32_t c = 0; c < held_.size(); ++c) {
    load.source[c].resize(end - load_from(c, end));
    if (cache_.tree.rows()[c].per_page()) cache_.make_room(load.source[c].size(), c);
    require_open();  // that may have run user code
    cache_.tree.copy_ids(host_node_, c, 1, load_from(c, end), load.source[c].data());
    load.target[c] = load.source[c];
    held_[c].table.reserve(end);
    if (held_[c].state < 0) continue;
    load.source[c].resize(2, load.source[c][0]);
    load.target[c].reserve(2);
  }
  for (std::uint32_t c = 0; c < held_.size(); ++c) {
    const std::uint64_t free = cache_.pools[c]->owned(Owner::free);
    if (cache_.tree.rows()[c].per_page() && free < load.target[c].size())
      throw NoPages{load.target[c].size(), free, 0, cache_.pools[c]->total(), what(cache_.tree.rows()[c])};
  }
  // Nothing below can fail.
  for (std::uint32_t c = 0; c < held_.size(); ++c) {
    Holding& own = held_[c];
    if (own.state >= 0) {  // one to compute with, and one for the tree if a slot is free
      load.target[c] = {own.state};
      if (own.mark < 0 && cache_.pools[c]->owned(Owner::free) > 0) own.mark = cache_.allocate_slot(c);
      if (own.mark >= 0) {
        own.mark_pages = end;
        load.target[c].push_back(own.mark);
      }
      load.source[c].resize(load.target[c].size());
      continue;
    }
    const std::uint32_t skipped = load_from(c, end) - owned_;
    std::fill_n(own.table.extend(skipped), skipped, -1);
    cache_.allocate(load.target[c].size(), c, &own.table);
    std::copy_n(own.table.from(owned_ + skipped).data(), load.target[c].size(), load.target[c].data());
  }
  reserved_ = published() + loadable();
  inside_ = 0;  // the host has more
  load.id = load_ = ++cache_.loads_;
  return load;
}

void Lease::end_load(bool arrived) {
  require_open();
  if (!load_) return;
  load_ = 0;
  const std::uint64_t positions = loadable();
  forget_host();
  if (!arrived) {
    revert_load();
    return;
  }
  hit_ += positions;
  cache_.counters.host_hit += positions;
  if (counted_) cache_.counters.hit += positions;
  publish(hit_);
}

// The load failed. Keeps the full-attention pages, to be computed; resets everything else to the hit.
void Lease::revert_load() {
  for (std::uint32_t c = 0; c < held_.size(); ++c) {
    Holding& own = held_[c];
    if (own.state >= 0) {
      cache_.free(c, {&own.mark, 1});
      own.mark = -1;
      if (node_) cache_.copy_state(state_at_node(c), own.state);
    } else if (slides(c)) {
      std::int32_t* ids = own.table.own();
      cache_.free(c, own.table.from(owned_));
      own.table.drop_back(own.table.size() - owned_);
      if (node_) cache_.tree.copy_ids(node_, c, 0, 0, ids);
      own.front = 0;
      drop_before(c, cache_.tree.rows()[c].first_needed(owned_, cache_.tree.page_size()));
    }
  }
}

void Lease::forget_host() {
  if (host_node_) cache_.tree.unlock(host_node_, 1);
  host_node_ = 0;
  host_pages_ = 0;
}

// A lease counts as a query when it gets its first pages: a request that found no room tries again.
void Lease::count_once() {
  if (counted_) return;
  counted_ = true;
  cache_.counters.queried += length_;
  cache_.counters.hit += hit_;
  cache_.counters.partial_hit += hit_ - published();
}

void Lease::reserve(std::uint64_t n) {
  require_open();
  end_copy(false);
  std::uint64_t missing;
  while ((missing = missing_pages(n)) > cache_.pools[0]->owned(Owner::free)) {
    cache_.make_room(missing);
    require_open();  // that may have run user code
  }
  if (missing) cache_.allocate(missing, 0, &held_[0].table);
  reserved_ += n;
  count_once();
}

// Entries before page `first` are not read any more: frees the private ones.
void Lease::drop_before(std::uint32_t component, std::uint32_t first) {
  Holding& own = held_[component];
  first = std::min(first, static_cast<std::uint32_t>(own.table.size()));
  if (first <= own.front) return;
  std::int32_t* ids = own.table.own();
  if (first > owned_) {
    const std::uint32_t begin = std::max(own.front, owned_);
    cache_.free(component, {ids + begin, first - begin});
  }
  std::fill(ids + own.front, ids + first, -1);
  own.front = first;
}

void Lease::slide(std::uint64_t begin, std::uint64_t end) {
  require_open();
  require(end <= reserved_, "end", end, "at most what is reserved");
  require(begin <= end, "begin", begin, "at most `end`");
  for (const std::uint32_t c : cache_.windows) {
    const Component& row = cache_.tree.rows()[c];
    Table& table = held_[c].table;
    const std::uint64_t covered = std::uint64_t{table.size()} * cache_.tree.page_size();
    require(begin <= covered, "begin", begin, "at most what has window pages");
    const std::uint64_t seen = begin - std::min<std::uint64_t>(row.window, begin);
    if (!load_) drop_before(c, static_cast<std::uint32_t>(seen / cache_.tree.page_size()));  // a load writes to them
    while (pages_of(end) > table.size() && pages_of(end) - table.size() > cache_.pools[c]->owned(Owner::free)) {
      cache_.make_room(pages_of(end) - table.size(), c);
      require_open();  // that may have run user code
    }
    if (pages_of(end) > table.size()) cache_.allocate(pages_of(end) - table.size(), c, &table);
  }
}

std::uint64_t Lease::publishable() const {
  if (load_) return published();
  std::uint64_t positions = std::min(reserved_, length_);
  for (const std::uint32_t c : cache_.windows)
    positions = std::min(positions, std::uint64_t{held_[c].table.size()} * cache_.tree.page_size());
  return positions;
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
  if (!cache_.enabled) return;
  const auto pages = static_cast<std::uint32_t>(upto / cache_.tree.page_size());
  for (const std::uint32_t c : cache_.states)
    if (held_[c].mark >= 0 && held_[c].mark_pages <= pages) publish_pages(held_[c].mark_pages, c);
  if (owned_ < reach_ && reach_ <= pages && reach() > hit_ && held_.size() > 1) {
    publish_pages(reach_, kMaxComponents);  // other sequences part from this one there
    if (owned_ == reach_) cache_.tree.keep_window(node_, 0);
  }
  publish_pages(pages, kMaxComponents);
}

// Publishes the pages up to `pages`, and the marked state of component `state_row` there, if any.
void Lease::publish_pages(std::uint32_t pages, std::uint32_t state_row) {
  const bool keeps_state = state_row < kMaxComponents;
  if (pages < owned_ || (pages == owned_ && !keeps_state)) return;
  if (pages == owned_) {
    if (cache_.tree.residency(node_, state_row, 0) == Residency::absent)
      cache_.tree.attach(node_, state_row, 0, {&held_[state_row].mark, 1}, true);
    settle_mark(state_row);
    return;
  }
  // Everything is before the window: there is nothing to keep.
  if (slides(0) && !keeps_state && held_[0].table.part(0, pages).back() < 0) return;
  std::array<IdSpan, kMaxComponents> ids;
  for (const std::uint32_t c : cache_.paged)
    ids[c] = held_[c].table.part(owned_, pages);
  if (keeps_state) ids[state_row] = {&held_[state_row].mark, 1};
  const Bytes key = Bytes(key_).subspan(key_begin_, (pages - owned_) * std::size_t{cache_.tree.page_bytes()});
  // Allocate memory for tables that name the tree's pages instead, before anything changes.
  Table::Memory spare;
  if (!slides(0) && cache_.tree.knows(ns_, node_, key)) spare = held_[0].table.copy(held_[0].table.room());
  std::vector<std::int32_t> theirs;
  for (const std::uint32_t c : cache_.windows) {
    theirs.resize(pages - owned_);
    held_[c].table.own();
  }
  // The key is this lease's own, so its node is on its path: the prefix need not be read again.
  const InsertResult added =
      cache_.tree.insert(ns_, node_, {key, {ids.data(), held_.size()}}, priority_, 0, true, true);
  if (added.pages == owned_) return;
  cache_.tree.move_lock(node_, added.node, 0);
  node_ = added.node;
  cache_.touched(node_);
  if (!slides(0)) adopt(added.pages, added.existing, &spare);
  for (const std::uint32_t c : cache_.windows)
    adopt_sliding(c, added.pages, theirs.data());
  drop_key(added.pages - owned_);
  owned_ = added.pages;
  drop_before_windows();
  if (keeps_state && owned_ == pages) settle_mark(state_row);
}

// Pages up to `end` are the tree's now. Before `existing` the tree may have had other pages: they replace ours.
void Lease::adopt(std::uint32_t end, std::uint32_t existing, Table::Memory* spare) {
  Table& table = held_[0].table;
  if (existing <= owned_) {
    cache_.pools[0]->move(table.part(owned_, end), Owner::privately, Owner::cached);
    return;
  }
  table.exchange(*spare);
  const std::int32_t* ours = spare->get();
  std::int32_t* theirs = table.memory().get() + owned_;
  cache_.tree.copy_ids(node_, 0, 0, owned_, theirs);
  for (std::size_t page = owned_; page < end; ++page, ++theirs)
    settle_page(0, ours[page], *theirs);
}

// The same for a component that the tree may have lacked in places: checks each page.
void Lease::adopt_sliding(std::uint32_t component, std::uint32_t end, std::int32_t* theirs) {
  cache_.tree.copy_ids(node_, component, 0, owned_, theirs);
  std::int32_t* ours = held_[component].table.own();
  for (std::uint32_t page = owned_; page < end; ++page, ++theirs) {
    settle_page(component, ours[page], *theirs);
    if (ours[page] >= 0) ours[page] = *theirs;  // pages before the window may be unlocked
  }
}

// Publishes a page of ours (-1: none), or frees it if the tree has another in its place.
void Lease::settle_page(std::uint32_t component, std::int32_t ours, std::int32_t theirs) {
  if (ours < 0) return;
  const bool duplicate = ours != theirs;
  cache_.pools[component]->move({&ours, 1}, Owner::privately, duplicate ? Owner::free : Owner::cached);
  cache_.counters.duplicate_pages += duplicate;
}

// Drops the symbols of published pages: the tree has them.
void Lease::drop_key(std::uint32_t pages) {
  key_begin_ += std::size_t{pages} * cache_.tree.page_bytes();
  if (key_begin_ * 2 < key_.size()) return;
  key_.erase(key_.begin(), key_.begin() + static_cast<std::ptrdiff_t>(key_begin_));
  key_begin_ = 0;
}

// Without `upto`: everything reserved, less the last position if tokens were appended, since no forward has computed
// the KV of a token that was just sampled.
void Lease::finish(std::optional<std::uint64_t> upto) {
  if (closed_) return;
  const std::uint64_t end = upto ? *upto : std::min(publishable(), length_ - appended_);
  if (end >= published()) publish(end);
  abort();
}

void Lease::abort() {
  if (closed_) return;
  end_copy(false);
  closed_ = true;
  if (load_) {
    cache_.abandon({node_, 0, host_node_, load_, std::move(held_), owned_});
    return;
  }
  forget_host();
  cache_.release_held(node_, held_, owned_);
}

}  // namespace mainstem
