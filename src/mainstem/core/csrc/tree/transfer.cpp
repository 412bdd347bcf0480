// Transfers: ids whose contents are being copied. They are in flight under the name of a node, and locked, until the
// transfer is committed or cancelled.
#include <new>

#include "tree/tree.h"

namespace mainstem {

void Tree::attach(Handle handle, std::uint32_t component, std::uint32_t tier, IdSpan ids, bool ready) {
  const std::size_t column = cells_.find_column(component, tier);
  const Index node = nodes_.resolve(handle);
  require(node != kNone, "node", 0, "a node with pages");
  const std::size_t expected = cells_.component(column).ids(nodes_[node].pages);
  if (ids.size() != expected) throw BadValue{"number of ids", std::to_string(ids.size()), std::to_string(expected)};
  for (const std::int32_t id : ids)
    if (id < 0) throw BadValue{"id", std::to_string(id), "0 or more"};
  if (!cells_.cell(node, column).absent()) throw BadValue{"cell", "occupied", "absent"};
  const Index parent = nodes_[node].parent;
  if (cells_.component(column).leaf_only() && !nodes_[parent].root() && cells_.cell(parent, column).absent())
    throw BadValue{"cell of the parent", "absent", "on the same tier before its child"};
  occupy(node, column, Run<std::int32_t>(ids.data(), ids.size()), ready ? kNone : node);
  if (ready) return;
  try {
    lock_all(node, tier, +1);
  } catch (const std::bad_alloc&) {
    for (Index at = node; cells_.cell(at, column).transfer == node; at = nodes_[at].parent)
      vacate(at, column);
    throw;
  }
}

// Calls `each` with the nodes of a transfer, from the last one up, and the column of each component, then unlocks them.
template <class Each>
void Tree::end_transfer(Index node, std::uint32_t tier, Each each) {
  bool found = false;
  for (std::uint32_t c = 0; node != kNone && c < cells_.components(); ++c) {
    const std::size_t column = cells_.column_of(c, tier);
    const auto in_transfer = [&](Index at) {
      return cells_.cell(at, column).in_flight() && cells_.cell(at, column).transfer == node;
    };
    if (!in_transfer(node)) continue;
    found = true;
    for (Index at = node; !nodes_[at].root(); at = nodes_[at].parent)
      if (in_transfer(at)) each(at, column);
    lock_all(node, tier, -1);
  }
  if (!found)
    throw BadValue{"node", std::to_string(nodes_.handle(node)), "a node whose pages are in flight on this tier"};
}

void Tree::commit(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  end_transfer(node, tier, [&](Index at, std::size_t column) { arrive(at, column); });
  join(node);
}

// Returns the first nodes of what was inserted after pages in flight, and cannot be found without them.
std::vector<Index> Tree::inserted_after(Index node, std::uint32_t tier) const {
  std::vector<Index> found;
  if (node == kNone || !cells_.rows[0].leaf_only()) return found;
  const std::size_t column = cells_.column_of(0, tier);
  for (Index at = node, from = kNone; cells_.cell(at, column).transfer == node; from = at, at = nodes_[at].parent)
    for (Index child = nodes_[at].first_child; child != kNone; child = nodes_[child].next)
      if (child != from && !nodes_[at].removed && !cells_.cell(child, column).absent()) {
        if (!nodes_.every_from(child, [&](Index below) { return cells_.only_on(below, tier); }))
          throw BadValue{"node", std::to_string(nodes_.handle(node)),
                         "cancelled only after what follows it on this tier and on another was cancelled or removed"};
        found.push_back(child);
      }
  return found;
}

std::vector<Ids> Tree::cancel(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  std::vector<Ids> freed(cells_.components());
  const std::vector<Index> below = inserted_after(node, tier);
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    std::size_t ids = 0;
    for (Index at = node; at != kNone; at = nodes_[at].parent) {
      const Cell& cell = cells_.cell(at, cells_.column_of(c, tier));
      if (cell.in_flight() && cell.transfer == node) ids += cell.ids.size();
    }
    freed[c].reserve(ids);
  }
  detach(below, Why::unknown);  // nothing below can fail
  end_transfer(node, tier, [&](Index at, std::size_t column) {
    const Run<std::int32_t> ids = vacate(at, column);
    Ids& of_component = freed[cells_.component_index(column)];
    of_component.insert(of_component.begin(), ids.data(), ids.data() + ids.size());
  });
  reap(node);
  return freed;
}

}  // namespace mainstem
