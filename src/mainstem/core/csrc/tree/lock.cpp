// Locks: what must not be evicted, because it is in use.
#include "tree/tree.h"

namespace mainstem {

void Tree::lock(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  if (node == kNone) return;
  lock_all(node, tier, +1);
  cells_.pin(node, tier, +1);
}

void Tree::unlock(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  if (node == kNone) return;
  if (cells_.locks_taken(node, tier) == 0) throw NotLocked{handle};
  cells_.pin(node, tier, -1);
  lock_all(node, tier, -1);
  if (cells_.dead(node))
    reap(node);
  else
    release_boundary(node);
}

void Tree::move_lock(Handle from_handle, Handle to_handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index from = nodes_.resolve(from_handle);
  const Index to = nodes_.resolve(to_handle);
  if (from == to) return;
  if (from != kNone && cells_.locks_taken(from, tier) == 0) throw NotLocked{from_handle};
  if (from == kNone || to == kNone) {
    lock(to_handle, tier);
    unlock(from_handle, tier);
    return;
  }
  for (std::uint32_t c = 0; c < cells_.components(); ++c)
    split_at_window(to, cells_.column_of(c, tier));
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    const std::size_t column = cells_.column_of(c, tier);
    if (cells_.component(column).leaf_only()) {
      lock_path(to, from, column, +1);  // nodes above `from` keep their count
    } else {
      lock_path(to, kNone, column, +1);
      lock_path(from, kNone, column, -1);
    }
  }
  cells_.pin(to, tier, +1);
  cells_.pin(from, tier, -1);
  release_boundary(from);
  for (std::uint32_t c = 0; c < cells_.components(); ++c)
    join_before_window(to, cells_.column_of(c, tier));
}

void Tree::refresh_use(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  if (node != kNone) eviction_.in_use(node, tier);
}

void Tree::keep_window(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  for (std::uint32_t c = 0; node != kNone && c < cells_.components(); ++c)
    eviction_.end_window(node, cells_.column_of(c, tier), kMatched);
}

void Tree::expect_fork(Handle handle) {
  const Index node = nodes_.resolve(handle);
  if (node != kNone) nodes_[node].forked = true;
}

}  // namespace mainstem
