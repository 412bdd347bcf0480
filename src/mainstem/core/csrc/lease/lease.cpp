#include "lease/lease.h"

#include <algorithm>
#include <array>
#include <cassert>

namespace mainstem {

Lease::Lease(Cache& cache, std::string_view ns, std::int32_t priority, Bytes key, std::uint64_t limit, bool inside,
             const CheckRest& check_rest)
    : cache_(cache),
      ns_(ns),
      priority_(priority),
      held_(cache.tree.rows()),
      length_(key.size() / cache.tree.symbol_bytes()) {
  cache.end_abandoned();
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
  held_.each_table([&](Paged& own) { own.table.reserve(pages); });
  owned_ = match.pages;
  if (match.host_pages && !host_has(match)) match.host_pages = 0;
  cache.tree.lock(match.node, kDevice);
  if (match.host_pages) {
    try {
      cache.tree.lock(match.host_node, kHost);
    } catch (...) {
      cache.tree.unlock(match.node, kDevice);
      throw;
    }
    host_node_ = match.host_node;
    host_pages_ = match.host_pages;
  }
  // Nothing below can fail.
  node_ = match.node;
  if (node_ && held_.full) held_.full->take(cache, node_, owned_);
  for (Sliding& own : held_.sliding)
    if (node_) own.take(cache, node_, owned_);
  inside_ = match.partial;
  source_ = match.partial_id;
  donor_ = match.partial_node;
  hit_ = reserved_ = published();
  reach_ = reach;
  ++cache.counters.open;
  cache.touched(match.host_pages ? match.host_node : match.node);
  try {
    for (StateSlot& own : held_.states)
      own.take(*this);
  } catch (...) {
    abort();
    throw;
  }
}

Lease::~Lease() {
  if (!closed_) cache_.abandon({node_, copying_ ? donor_ : 0, host_node_, load_, std::move(held_), owned_});
}

bool Lease::checkpoint(std::uint64_t position, bool room, bool mark) {
  require_open();
  require(!load_, "position", position, "none while a state is in flight");
  require(position % page_size() == 0, "position", position, "the end of a page");
  require(position >= std::max<std::uint64_t>(published(), 1), "position", position, "not before what is published");
  require(position <= publishable(), "position", position, "at most what is reserved, and what is known");
  if (!cache_.enabled) return false;
  bool all = true;
  for (StateSlot& own : held_.states)
    all = own.checkpoint(*this, static_cast<std::uint32_t>(position / page_size()), room, mark) && all;
  return all;
}

// ---------------------------------------------------------------- the copy of a shared page

std::optional<PageCopy> Lease::begin_copy() {
  require_open();
  if (inside_ == 0 || copying_ || held_.table().size() != owned_ || published() != hit_) return {};
  Table& table = held_.full->table;  // only full attention matches inside a page
  // Neither the eviction for the new page nor the copying code may free the source.
  cache_.tree.lock(donor_, kDevice);
  try {
    make_room(1, 0);
    cache_.allocate(1, 0, &table);
    copying_ = true;
    return PageCopy{source_, *table.from(owned_).data(), inside_};
  } catch (const NoPages&) {
    ++cache_.counters.partial_missed;
    cache_.tree.unlock(donor_, kDevice);
    return {};
  } catch (...) {
    cache_.tree.unlock(donor_, kDevice);
    throw;
  }
}

void Lease::end_copy(bool copied) {
  if (!copying_) return;
  copying_ = false;
  cache_.tree.unlock(donor_, kDevice);
  if (copied) {
    hit_ += inside_;
    reserved_ = hit_;
  } else {
    cache_.free(0, held_.full->table.from(owned_));
    held_.full->table.drop_back(1);
  }
  inside_ = 0;
}

// ---------------------------------------------------------------- loads from the host

// Whether the host alone has everything that a load needs. With more than full attention a part may be on the device
// only.
bool Lease::host_has(const MatchResult& match) const {
  if (held_.size() == 1 && held_.full) return true;
  const std::uint32_t end = match.pages + match.host_pages;
  for (std::uint32_t c = 0; c < cache_.pools.size(); ++c) {
    const std::uint32_t from = std::max(owned_, cache_.row(c).first_needed(end, page_size()));
    if (!cache_.tree.has(match.host_node, c, kHost, from)) return false;
  }
  return true;
}

PageLoad Lease::begin_load() {
  require_open();
  require(host_pages_ && !load_ && held_.table().size() == owned_ && published() == hit_, "lease", host_pages_,
          "one with pages on the host, before anything is reserved");
  const std::uint32_t end = owned_ + host_pages_;
  PageLoad load;
  held_.each_table([&](Paged& own) { own.prepare_load(*this, end, &load); });
  for (StateSlot& own : held_.states)
    own.prepare_load(*this, end, &load);
  held_.each_table([&](Paged& own) {  // making room for one component may have run code that took another's
    const std::uint64_t needed = load.target[own.component].size();
    if (cache_.free_ids(own.component) < needed) throw cache_.none(needed, own.component, 0);
  });
  // Nothing below can fail.
  held_.each_table([&](Paged& own) { own.begin_load(cache_, owned_, end, &load); });
  for (StateSlot& own : held_.states)
    own.begin_load(cache_, end, &load);
  reserved_ = published() + loadable();
  inside_ = 0;  // the host has more
  load.id = load_ = cache_.begin_load();
  return load;
}

void Lease::end_load(bool arrived) {
  require_open();
  if (!load_) return;
  load_ = 0;
  const std::uint64_t positions = loadable();
  release_host();
  if (!arrived) {  // the pages of full attention stay, to be computed; the rest is as it was at the hit
    for (Sliding& own : held_.sliding)
      own.revert_load(cache_, node_, owned_);
    for (StateSlot& own : held_.states)
      own.revert_load(cache_, node_, owned_);
    return;
  }
  hit_ += positions;
  cache_.counters.host_hit += positions;
  if (counted_) cache_.counters.hit += positions;
  publish(hit_);
}

void Lease::release_host() {
  if (host_node_) cache_.tree.unlock(host_node_, kHost);
  host_node_ = 0;
  host_pages_ = 0;
}

// ---------------------------------------------------------------- pages

// A lease counts as a query when it gets its first pages: a request that found no room tries again.
void Lease::count_once() {
  if (counted_) return;
  counted_ = true;
  cache_.counters.queried += length_;
  cache_.counters.hit += hit_;
  cache_.counters.partial_hit += hit_ - published();
}

// Allocates pages until there is one for each of the first `positions`.
void Lease::grow(Paged& own, std::uint64_t positions) {
  const std::uint64_t pages = pages_of(positions);
  std::uint64_t missing;
  while ((missing = pages - std::min<std::uint64_t>(pages, own.table.size())) > cache_.free_ids(own.component))
    make_room(missing, own.component);
  if (missing) cache_.allocate(missing, own.component, &own.table);
}

void Lease::reserve(std::uint64_t n, bool counts) {
  require_open();
  end_copy(false);
  while (held_.full &&
         held_.full->table.size() < pages_of(reserved_ + n))  // making room may run code that reserves, too
    grow(*held_.full, reserved_ + n);
  reserved_ += n;
  if (counts) count_once();
}

void Lease::slide(std::uint64_t begin, std::uint64_t end) {
  require_open();
  require(end <= reserved_, "end", end, "at most what is reserved");
  require(begin <= end, "begin", begin, "at most `end`");
  for (const Sliding& own : held_.sliding)
    require(begin <= std::uint64_t{own.table.size()} * page_size(), "begin", begin, "at most what has window pages");
  for (Sliding& own : held_.sliding) {
    const std::uint64_t first = cache_.row(own.component).first_read(begin);
    if (!load_)
      own.drop_before(cache_, static_cast<std::uint32_t>(first / page_size()), owned_);  // a load writes to them
    grow(own, end);
  }
}

std::uint64_t Lease::publishable() const {
  if (load_) return published();
  std::uint64_t positions = std::min(reserved_, length_);
  for (const Sliding& own : held_.sliding)
    positions = std::min(positions, std::uint64_t{own.table.size()} * page_size());
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
  const auto pages = static_cast<std::uint32_t>(upto / page_size());
  for (StateSlot& own : held_.states)
    if (own.copy >= 0 && own.copy_pages <= pages) publish_pages(own.copy_pages, &own);
  if (owned_ < reach_ && reach_ <= pages && reach() > hit_ && held_.size() > 1) {
    publish_pages(reach_, nullptr);  // other sequences part from this one there
    if (owned_ == reach_) cache_.tree.keep_window(node_, kDevice);
  }
  publish_pages(pages, nullptr);
  cache_.settle();
}

// Publishes the pages up to `pages`, and the copy of a state there, if any.
void Lease::publish_pages(std::uint32_t pages, StateSlot* state) {
  if (pages < owned_ || (pages == owned_ && !state)) return;
  if (pages == owned_) {
    if (cache_.tree.presence(node_, state->component, kDevice) == Presence::absent)
      cache_.tree.attach(node_, state->component, kDevice, {&state->copy, 1}, true);
    state->adopt(cache_, node_, owned_);
    return;
  }
  // Everything is before the window: there is nothing to keep.
  if (held_.slides() && !state && held_.table().part(0, pages).back() < 0) return;
  std::array<IdSpan, kMaxComponents> ids;
  held_.each_table([&](Paged& own) { ids[own.component] = own.table.part(owned_, pages); });
  if (state) ids[state->component] = {&state->copy, 1};
  const Bytes key = Bytes(key_).subspan(key_begin_, (pages - owned_) * std::size_t{cache_.tree.page_bytes()});
  // Allocate memory for tables that name the tree's pages instead, before anything changes.
  if (held_.full && cache_.tree.knows(ns_, node_, key)) held_.full->prepare_adoption();
  for (Sliding& own : held_.sliding)
    own.prepare_adoption(pages - owned_);
  // The key is this lease's own, so its node is on its path: the prefix need not be read again.
  const InsertResult added =
      cache_.tree.insert(ns_, node_, {key, {ids.data(), cache_.pools.size()}}, priority_, kDevice, true, true);
  if (added.pages == owned_) return;
  cache_.tree.move_lock(node_, added.node, kDevice);
  node_ = added.node;
  cache_.touched(node_);
  const Adoption adoption{node_, owned_, added.pages, added.existing};
  if (held_.full) held_.full->adopt(cache_, adoption);
  for (Sliding& own : held_.sliding)
    own.adopt(cache_, adoption);
  drop_key(added.pages - owned_);
  owned_ = added.pages;
  if (state && owned_ == pages) state->adopt(cache_, node_, owned_);
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
  release_host();
  cache_.end(node_, held_, owned_);
  cache_.settle();
}

}  // namespace mainstem
