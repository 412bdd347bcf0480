#include "lease/holding.h"

#include <algorithm>

#include "lease/cache.h"
#include "lease/lease.h"

namespace mainstem {

// ---------------------------------------------------------------- paged

void Paged::take(const Cache& cache, Handle node, std::uint32_t owned) {
  cache.tree.copy_ids(node, component, kDevice, 0, table.extend(owned));
}

void Paged::free(Cache& cache, std::size_t owned) {
  if (table.size() > owned) cache.free(component, table.from(owned));
}

void Paged::adopt(Cache& cache, const Adoption& a) {
  const Table::Memory spare = std::move(spare_);
  if (a.existing <= a.owned) {
    cache.pools[component]->move(table.part(a.owned, a.end), Owner::privately, Owner::cached);
    return;
  }
  const Table::Memory before = table.exchange(spare);
  const std::int32_t* ours = before.get();
  std::int32_t* theirs = table.memory().get() + a.owned;
  cache.tree.copy_ids(a.node, component, kDevice, a.owned, theirs);
  for (std::size_t page = a.owned; page < a.end; ++page, ++theirs)
    cache.publish_page(component, ours[page], *theirs);
}

std::uint32_t Paged::load_from(const Cache& cache, std::uint32_t owned, std::uint32_t end) const {
  return std::max(owned, cache.row(component).first_needed(end, cache.tree.page_size()));
}

void Paged::prepare_load(Lease& lease, std::uint32_t end, PageLoad* load) {
  const Cache& cache = lease.cache();
  const std::uint32_t from = load_from(cache, lease.owned(), end);
  Ids& source = load->source[component];
  source.resize(end - from);
  lease.make_room(source.size(), component);
  cache.tree.copy_ids(lease.host_node(), component, kHost, from, source.data());
  load->target[component] = source;
  table.reserve(end);
}

void Paged::begin_load(Cache& cache, std::uint32_t owned, std::uint32_t end, PageLoad* load) {
  Ids& target = load->target[component];
  const std::uint32_t skipped = load_from(cache, owned, end) - owned;
  std::fill_n(table.extend(skipped), skipped, -1);
  cache.allocate(target.size(), component, &table);
  std::copy_n(table.from(owned + skipped).data(), target.size(), target.data());
}

// ---------------------------------------------------------------- sliding

void Sliding::take(Cache& cache, Handle node, std::uint32_t owned) {
  Paged::take(cache, node, owned);
  drop_before_end(cache, owned);
}

void Sliding::prepare_adoption(std::uint32_t pages) {
  theirs_.resize(pages);
  table.own();
}

// The tree may have lacked this component in places: looks at each page.
void Sliding::adopt(Cache& cache, const Adoption& a) {
  Ids found = std::move(theirs_);
  cache.tree.copy_ids(a.node, component, kDevice, a.owned, found.data());
  std::int32_t* ours = table.own();
  for (std::uint32_t page = a.owned; page < a.end; ++page) {
    if (ours[page] < 0) continue;  // pages before the window may be unlocked
    const std::int32_t theirs = found[page - a.owned];
    cache.publish_page(component, ours[page], theirs);
    ours[page] = theirs;
  }
  drop_before_end(cache, a.end);
}

void Sliding::revert_load(Cache& cache, Handle node, std::uint32_t owned) {
  std::int32_t* ids = table.own();
  cache.free(component, table.from(owned));
  table.drop_back(table.size() - owned);
  if (node) cache.tree.copy_ids(node, component, kDevice, 0, ids);
  front_ = 0;
  drop_before_end(cache, owned);
}

void Sliding::drop_before(Cache& cache, std::uint32_t first, std::uint32_t owned) {
  first = std::min(first, static_cast<std::uint32_t>(table.size()));
  if (first <= front_) return;
  std::int32_t* ids = table.own();
  if (first > owned) {
    const std::uint32_t begin = std::max(front_, owned);
    cache.free(component, {ids + begin, first - begin});
  }
  std::fill(ids + front_, ids + first, -1);
  front_ = first;
}

void Sliding::drop_before_end(Cache& cache, std::uint32_t owned) {
  drop_before(cache, cache.row(component).first_needed(owned, cache.tree.page_size()), owned);
}

// ---------------------------------------------------------------- states

std::int32_t StateSlot::state_at(const Cache& cache, Handle node, std::uint32_t owned) const {
  std::int32_t at;
  cache.tree.copy_ids(node, component, kDevice, owned - 1, &at);
  return at;
}

void StateSlot::take(Lease& lease) {
  Cache& cache = lease.cache();
  lease.make_room(1, component);
  slot = cache.allocate_slot(component);
  if (lease.node()) cache.copy_state(state_at(cache, lease.node(), lease.owned()), slot);
}

void StateSlot::free(Cache& cache) {
  cache.free(component, {&slot, 1});
  cache.free(component, {&copy, 1});
}

bool StateSlot::checkpoint(Lease& lease, std::uint32_t pages, bool room, bool mark) {
  Cache& cache = lease.cache();
  if (copy < 0) {
    try {
      if (room) lease.make_room(1, component);
      copy = cache.allocate_slot(component);
    } catch (const NoPages&) {
      ++cache.counters.checkpoints_missed;
      return false;
    }
  }
  copy_pages = pages;
  copy_marked = mark;
  try {
    cache.copy_state(slot, copy);
  } catch (...) {
    cache.free(component, {&copy, 1});
    copy = -1;
    throw;
  }
  return true;
}

void StateSlot::adopt(Cache& cache, Handle node, std::uint32_t owned) {
  const bool taken = state_at(cache, node, owned) == copy;
  cache.publish(component, copy, !taken);
  copy = -1;
  if (copy_marked) cache.tree.expect_fork(node);
  if (!taken) return;
  ++cache.counters.checkpoints;
  const std::uint32_t limit = cache.row(component).most_on_path;
  if (limit) cache.pools[component]->move(cache.tree.thin(node, component, kDevice, limit), Owner::cached, Owner::free);
}

void StateSlot::prepare_load(Lease& lease, std::uint32_t end, PageLoad* load) {
  Ids& source = load->source[component];
  source.resize(1);
  lease.cache().tree.copy_ids(lease.host_node(), component, kHost, end - 1, source.data());
  source.resize(2, source[0]);
  load->target[component].reserve(2);
}

// One slot to compute with, and one for the tree if a slot is free.
void StateSlot::begin_load(Cache& cache, std::uint32_t end, PageLoad* load) {
  Ids& target = load->target[component];
  target = {slot};
  if (copy < 0 && cache.free_ids(component) > 0) copy = cache.allocate_slot(component);
  if (copy >= 0) {
    copy_pages = end;
    copy_marked = false;
    target.push_back(copy);
  }
  load->source[component].resize(target.size());
}

void StateSlot::revert_load(Cache& cache, Handle node, std::uint32_t owned) {
  cache.free(component, {&copy, 1});
  copy = -1;
  if (node) cache.copy_state(state_at(cache, node, owned), slot);
}

// ---------------------------------------------------------------- all of them

Holdings::Holdings(const std::vector<Component>& rows) {
  for (std::uint32_t c = 0; c < rows.size(); ++c) {
    if (!rows[c].per_page())
      states.emplace_back(c);
    else if (rows[c].begins_late())
      sliding.emplace_back(c);
    else
      full.emplace(c);
  }
}

const Table& Holdings::table(std::uint32_t component) const {
  static const Table none;
  if (full && component == full->component) return full->table;
  const auto own =
      std::find_if(sliding.begin(), sliding.end(), [&](const Sliding& s) { return s.component == component; });
  return own == sliding.end() ? none : own->table;
}

void Holdings::free(Cache& cache, std::size_t owned) {
  each_table([&](Paged& own) { own.free(cache, owned); });
  for (StateSlot& own : states)
    own.free(cache);
}

}  // namespace mainstem
