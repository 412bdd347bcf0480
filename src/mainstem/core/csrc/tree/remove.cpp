// Removal: a prefix becomes unfindable at once; its ids are freed when nobody uses them.
#include <algorithm>
#include <new>

#include "tree/tree.h"

namespace mainstem {

// Returns the children whose first page begins with a tail shorter than a page.
std::vector<Index> Tree::children_like(Index parent, Bytes tail) const {
  std::vector<Index> found;
  for (Index at = nodes_[parent].first_child; at != kNone; at = nodes_[at].next)
    if (std::equal(tail.begin(), tail.end(), nodes_[at].key.data())) found.push_back(at);
  return found;
}

std::uint64_t Tree::remove(std::string_view ns, Bytes key) {
  const std::uint32_t page_bytes = nodes_.page_bytes;
  const std::uint32_t pages = nodes_.whole_pages(key);
  const Bytes tail = key.subspan(std::size_t{pages} * page_bytes);
  const std::uint32_t kept = tail.empty() && pages ? pages - 1 : pages;  // before the page that the key ends in
  if (ghosts_ && key.empty()) ghosts_->removed_space(ns);
  const Index root = nodes_.find_root(ns);
  Walk path;
  if (root != kNone) nodes_.walk(root, key, pages, &path, {});
  if (ghosts_ && pages && tail.empty()) ghosts_->removed_page(ns, key, path);
  if (root == kNone || (path.empty() ? 0 : nodes_[path.back().node].start + path.back().pages) < pages) return 0;
  const Bytes first = key.subspan(std::size_t{kept} * page_bytes);  // the first page to remove, or its beginning
  while (!path.empty() && nodes_[path.back().node].start >= kept)
    path.pop_back();
  const Index above = path.empty() ? root : path.back().node;
  std::vector<Index> going;
  if (kept < nodes_[above].end()) {
    const std::uint32_t inside = kept - nodes_[above].start;
    if (!std::equal(first.begin(), first.end(), nodes_[above].key.data() + std::size_t{inside} * page_bytes)) return 0;
    split(above, inside);
    going.push_back(above);
  } else {
    going = children_like(above, first);
  }
  return detach(going, Why::removed);
}

// Removed nodes come first in their order, so this stops at the first other one.
std::vector<Ids> Tree::evict_removed(std::uint32_t tier) {
  cells_.require_tier(tier);
  std::vector<Ids> freed(cells_.components());
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    const std::size_t column = cells_.column_of(c, tier);
    try {
      for (Index node; (node = eviction_.first_removed(column)) != kNone;)
        evict_one(node, nodes_[node].pages, c, tier, &freed);
    } catch (const std::bad_alloc&) {  // keep what was freed before; the next eviction takes the rest
    }
    counters_.evicted_pages += freed[c].size();
  }
  return freed;
}

}  // namespace mainstem
