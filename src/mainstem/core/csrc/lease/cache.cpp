#include "lease/cache.h"

#include <new>

namespace mainstem {

Cache::Cache(Tree& tree_, std::vector<Pool*> pools_, bool enabled_)
    : tree(tree_), pools(std::move(pools_)), enabled(enabled_) {
  require(pools.size() == tree.rows().size(), "pools", pools.size(), "one for each component");
  require(row(0).per_page(), "components", 0, "first one with an id for each page");
  for (std::uint32_t c = 1; c < pools.size(); ++c)
    require(!row(c).leaf_only(), "components", c, "full attention first");
}

NoPages Cache::none(std::uint64_t n, std::uint32_t component, std::uint64_t evictable) const {
  return {n, free_ids(component), evictable, pools[component]->total(), row(component).ids_name()};
}

void Cache::make_room(std::uint64_t n, std::uint32_t component, std::string_view ns) {
  end_abandoned();
  if (free_ids(component) >= n) return;
  for (std::uint64_t free; (free = free_ids(component)) < n;) {
    const std::uint64_t available = tree.available(component, kDevice, ns);
    const NoPages none = this->none(n, component, available);
    if (n - free <= available) evict_some(n - free, component, ns);
    if (free_ids(component) <= free) {
      settle();
      throw none;
    }
  }
  settle();  // with "write_back" copies have ended meanwhile, and do not use their pages any more
}

void Cache::evict_some(std::uint64_t n, std::uint32_t component, std::string_view ns) {
  if (evict) return evict(component, n, ns);
  const std::vector<Ids> freed = tree.evict(n, component, kDevice, ns);
  for (std::size_t c = 0; c < freed.size(); ++c)
    pools[c]->move(freed[c], Owner::cached, Owner::free);
}

// Until a round frees nothing: with "write_back", what one component evicts may have been in the way of another's.
void Cache::settle_all() {
  end_abandoned();
  for (bool freed = true; freed;) {
    freed = false;
    for (std::uint32_t c = 0; c < pools.size(); ++c) {
      const auto [owner, ids] = tree.beyond_maximum(c, kDevice);
      const std::uint64_t free = free_ids(c);
      if (ids) evict_some(ids, c, std::string(owner));
      freed = freed || free_ids(c) > free;
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

void Cache::publish(std::uint32_t component, std::int32_t id, bool duplicate) {
  pools[component]->move({&id, 1}, Owner::privately, duplicate ? Owner::free : Owner::cached);
}

void Cache::end(Handle node, Holdings& held, std::size_t owned) {
  tree.refresh_use(node, kDevice);
  tree.unlock(node, kDevice);
  held.free(*this, owned);
  --counters.open;
}

void Cache::end_all_abandoned() {
  for (std::size_t at = abandoned_.size(); at-- > 0;) {
    if (abandoned_[at].load) continue;  // pages that are still written to must not be freed yet
    Abandoned left = std::exchange(abandoned_[at], std::move(abandoned_.back()));
    abandoned_.pop_back();
    tree.unlock(left.donor, kDevice);
    if (left.host_node) tree.unlock(left.host_node, kHost);
    end(left.node, left.held, left.owned);
  }
}

void Cache::end_load(std::uint64_t load) {
  for (Abandoned& left : abandoned_)
    if (left.load == load) left.load = 0;
  end_abandoned();
}

void Cache::touched(Handle node) noexcept {
  if (tree.tiers() == 1 || node == 0 || touched_.size() >= kMaxTouched) return;
  if (!touched_.empty() && touched_.back() == node) return;
  try {
    touched_.push_back(node);
  } catch (const std::bad_alloc&) {  // the only loss: it is not copied down
  }
}

}  // namespace mainstem
