#include "tree/shape.h"

#include <new>
#include <utility>

namespace mainstem {

TreeShape::TreeShape(std::uint32_t symbol_bytes, std::uint32_t page_size, std::vector<Component> components,
                     std::uint32_t tiers, std::string_view policy, std::uint64_t hash_seed,
                     std::uint32_t protected_hits)
    : nodes_(symbol_bytes, page_size, hash_seed),
      cells_(nodes_, std::move(components), tiers),
      eviction_(nodes_, cells_, policy, protected_hits),
      seed_(hash_seed) {
  reserve(1);
  nodes_.new_node();  // index 0 is no node
}

// ---------------------------------------------------------------- nodes

void TreeShape::reserve(std::size_t count) {
  nodes_.reserve_links(count);
  const std::size_t room = nodes_.room_for(count);
  if (!room) return;
  cells_.reserve(room);
  eviction_.reserve(room);
  if (ghosts_) ghosts_->reserve(room);
  nodes_.reserve(room);  // last: it says that there is room everywhere
}

Index TreeShape::make_root(std::string_view ns) {
  if (const Index root = nodes_.find_root(ns)) return root;
  Structure::Key name(reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
  if (eviction_.shares()) eviction_.shares()->reserve_owners(1);
  reserve(1);
  const OwnerId owner = cells_.enter(ns);  // the last that can fail: an owner without nodes would stay for ever
  const Index root = nodes_.new_node();
  nodes_.add_root(root, std::move(name));
  cells_.own(root, owner);
  eviction_.made(root, 0);
  return root;
}

Index TreeShape::add_child(Index parent, Structure::Key key, std::int32_t priority) noexcept {
  const Index node = nodes_.new_node();
  nodes_.add_child(parent, node, std::move(key));
  if (cells_.owners()) [[unlikely]]
    cells_.own(node, cells_.owners()->of(parent));
  eviction_.made(node, priority);
  return node;
}

// In three steps: make room, which may fail; split each; tell the order.
Index TreeShape::split(Index node, std::uint32_t pages) {
  Structure::Key::Room room = nodes_.room_to_split(node, pages);
  cells_.make_room_to_split(node, pages);
  reserve(1);

  const Index upper = nodes_.new_node();
  nodes_.split(node, upper, pages, std::move(room));
  cells_.split(upper, node);

  eviction_.split(upper, node);
  ++counters_.splits;
  return upper;
}

void TreeShape::split_at(Index node, std::uint32_t page) {
  while (nodes_[node].start > page)
    node = nodes_[node].parent;
  if (nodes_[node].start < page && page < nodes_[node].end()) split(node, page - nodes_[node].start);
}

// The lock of a window begins at a node boundary, so that it covers exactly the pages that the window needs.
void TreeShape::split_at_window(Index node, std::size_t column) {
  if (cells_.component(column).begins_late()) split_at(node, cells_.first_locked(node, column));
}

// Joins pieces of one insertion, or undoes a split: the parent becomes a part of `lower`, whose handles stay valid.
// Does nothing where somebody could tell the difference, or without memory.
void TreeShape::join(Index lower) noexcept {
  const Index upper = nodes_[lower].parent;
  if (!nodes_.may_join(upper, lower) || !cells_.may_join(upper, lower) || !eviction_.may_join(upper, lower)) return;
  Structure::Key::Room room;
  try {
    room = nodes_.room_to_join(lower);
    cells_.make_room_to_join(upper, lower);
  } catch (const std::bad_alloc&) {
    return;
  }
  if (ghosts_) [[unlikely]]
    ghosts_->joined(upper, lower);
  nodes_.join(lower, std::move(room));
  eviction_.join(upper, lower);
  cells_.join(upper, lower);
  cells_.free(upper);
  nodes_.free(upper);
}

void TreeShape::join_before_window(Index node, std::size_t column) noexcept {
  if (!cells_.component(column).begins_late()) return;
  const std::uint32_t first = cells_.first_locked(node, column);
  while (!nodes_[node].root() && nodes_[node].start > first)
    node = nodes_[node].parent;
  if (nodes_[node].root()) return;
  node = nodes_[node].parent;
  if (!nodes_[node].root()) join(node);
}

void TreeShape::reap(Index node) noexcept {
  bool unpinned = false;
  while (node != kNone && cells_.dead(node)) {
    const Index parent = nodes_[node].parent;
    if (nodes_[node].detached) [[unlikely]] {
      cells_.unpin_for_detached(parent);
      unpinned = true;
    }
    const std::uint64_t accessed = nodes_[node].accessed;
    cells_.free(node);
    nodes_.remove(node);
    if (ghosts_) [[unlikely]]
      ghosts_->reaped(node, eviction_.tick());
    nodes_.free(node);
    node = parent;
    if (node != kNone) eviction_.inherit(node, accessed);  // the node may have held nothing
  }
  if (unpinned && node != kNone) release_boundary(node);
}

// A removed node may be in use: it keeps its contents and its parent, but the parent and the child table do not refer
// to it any more. So the parent may get another child that begins with the same page. The first removed node of a path
// is called detached; it pins its parent, which therefore outlives it.
std::uint64_t TreeShape::detach(const std::vector<Index>& tops, Why why) {
  for (const Index node : tops)
    cells_.expect_detached(nodes_[node].parent);
  if (ghosts_) ghosts_->removed(tops, why, eviction_.tick());
  std::uint64_t pages = 0;
  for (const Index node : tops) {  // nothing below can fail
    cells_.pin_for_detached(nodes_[node].parent);
    nodes_.detach(node);
    nodes_.every_from(node, [&](Index at) {
      note_leaving(at);
      nodes_[at].removed = true;
      pages += nodes_[at].pages;
      if (cells_.owners()) disown(at);
      eviction_.refresh(at);
      return true;
    });
  }
  return pages;
}

void TreeShape::disown(Index node) noexcept {
  const OwnerId owner = cells_.owners()->of(node);
  eviction_.shares()->leave(node);
  cells_.disown(node);
  eviction_.shares()->settle(owner);
}

// ---------------------------------------------------------------- cells

// Nobody finds what a node holds any more.
void TreeShape::note_leaving(Index node) noexcept {
  for (std::uint32_t tier = 0; journal_ && tier < cells_.tiers; ++tier) {
    const Cell& cell = cells_.cell(node, tier);
    if (cell.present()) journal_->left(node, tier, {cell.ids.data(), cell.ids.size()});
  }
}

void TreeShape::vacate_into(Index node, std::size_t column, Ids* freed) {
  const Run<std::int32_t> ids = vacate(node, column);
  freed->insert(freed->end(), ids.data(), ids.data() + ids.size());
}

void TreeShape::lock_all(Index node, std::uint32_t tier, int by) {
  for (std::uint32_t c = 0; c < cells_.components() && by > 0; ++c)
    split_at_window(node, cells_.column_of(c, tier));
  for (std::uint32_t c = 0; c < cells_.components(); ++c)
    lock_path(node, kNone, cells_.column_of(c, tier), by);
}

}  // namespace mainstem
