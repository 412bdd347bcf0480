// Advice about the future. A retained prefix is locked until the caller, who knows the time, ends the retention; the
// tree counts the ids that retentions keep, so that the caller can bound them. A demoted prefix is evicted first. An
// announced next use is weighed against the policy, see eviction/expected.h.
#include <algorithm>

#include "tree/tree.h"

namespace mainstem {

namespace {

bool fits(const IdCounts& ids, const IdCounts& room) {
  return std::equal(ids.begin(), ids.end(), room.begin(),
                    [](std::uint64_t n, std::uint64_t most) { return n <= most; });
}

}  // namespace

// Shortens a walk to its first pages. Returns how long it is.
std::uint32_t Tree::cut_to(Walk* path, std::uint32_t pages) const {
  while (!path->empty() && nodes_[path->back().node].start >= pages)
    path->pop_back();
  if (path->empty()) return 0;
  Step& last = path->back();
  last.pages = std::min(last.pages, pages - nodes_[last.node].start);
  return nodes_[last.node].start + last.pages;
}

// Retains what `path_` has, or its beginning unless `all` is asked for.
Retained Tree::retain_walk(std::uint32_t tier, const IdCounts& room, bool all) {
  const std::uint32_t asked = path_.empty() ? 0 : nodes_[path_.back().node].start + path_.back().pages;
  // Each page of full attention costs one, so what there is room for is known from the top.
  std::uint64_t left = room[0];
  for (std::size_t at = 0; cells_.rows[0].leaf_only() && at < path_.size(); ++at) {
    if (cells_.retained(path_[at].node, cells_.column_of(0, tier))) continue;
    if (path_[at].pages > left) {
      cut_to(&path_, nodes_[path_[at].node].start + static_cast<std::uint32_t>(left));
      break;
    }
    left -= path_[at].pages;
  }
  const std::uint32_t end = cut_to(&path_, cells_.reach(path_, tier).best[tier]);
  if (end == 0 || (all && end < asked) || !fits(cells_.would_retain(path_, tier), room)) return {};
  cells_.expect_retention();
  const Index node = end_at(&path_, end);
  lock(nodes_.handle(node), tier);
  return {nodes_.handle(node), end, cells_.retain(node, tier, +1)};
}

Retained Tree::retain(std::string_view ns, Bytes key, std::uint32_t tier, const IdCounts& room) {
  cells_.require_tier(tier);
  nodes_.walk(nodes_.find_root(ns), key, nodes_.whole_pages(key), &path_, {});
  return retain_walk(tier, room, false);
}

Retained Tree::retain(Handle handle, std::uint32_t tier, const IdCounts& room) {
  cells_.require_tier(tier);
  path_.clear();
  for (Index at = nodes_.resolve(handle); at != kNone && !nodes_[at].root(); at = nodes_[at].parent)
    path_.push_back({at, nodes_[at].pages});
  std::reverse(path_.begin(), path_.end());
  return retain_walk(tier, room, true);
}

IdCounts Tree::end_retention(Handle handle, std::uint32_t tier) {
  cells_.require_tier(tier);
  const Index node = nodes_.resolve(handle);
  if (node == kNone || cells_.locks_taken(node, tier) == 0 || !cells_.retained(node, cells_.column_of(0, tier)))
    throw NotLocked{handle};
  const IdCounts alone = cells_.retain(node, tier, -1);
  unlock(handle, tier);
  return alone;
}

// Returns the highest nodes below which everything begins with a key, and the node above them if nothing else is below
// it (else kNone). If the tree has less of the key, returns its last node, unless another sequence goes on from there.
std::pair<std::vector<Index>, Index> Tree::beginning_with(std::string_view ns, Bytes key) {
  const std::uint32_t pages = nodes_.whole_pages(key);
  const Bytes tail = key.subspan(std::size_t{pages} * nodes_.page_bytes);
  const Index root = nodes_.find_root(ns);
  nodes_.walk(root, key, pages, &path_, {});
  if (root == kNone || key.empty()) return {};
  const Index last = path_.empty() ? root : path_.back().node;
  const Node& n = nodes_[last];
  const std::uint32_t inside = path_.empty() ? 0 : path_.back().pages;
  const bool whole = n.start + inside == pages;
  if (inside < n.pages) {
    const std::uint8_t* next = n.key.data() + std::size_t{inside} * nodes_.page_bytes;
    const bool begins = whole && std::equal(tail.begin(), tail.end(), next);
    if (!begins) return {};
    return {{last}, nodes_[n.parent].children() == 1 ? n.parent : kNone};
  }
  std::vector<Index> below;
  if (whole && !tail.empty()) below = children_like(last, tail);
  if (!below.empty()) return {below, below.size() == n.children() ? last : kNone};
  if (n.root() || (n.branches && !(whole && tail.empty()))) return {};
  return {{last}, nodes_[n.parent].children() == 1 ? n.parent : kNone};
}

std::vector<Handle> Tree::demote(std::string_view ns, Bytes key, std::uint32_t tiers) {
  require(tiers >= 1 && tiers <= cells_.tiers, "tiers", tiers, "1 to those of the tree");
  const auto [tops, above] = beginning_with(ns, key);
  std::vector<Handle> demoted;
  const auto demote = [&](Index at) {
    demoted.push_back(nodes_.handle(at));
    return true;
  };
  for (const Index top : tops)
    nodes_.every_from(top, demote);
  for (Index at = above; at != kNone && !nodes_[at].root();) {
    demote(at);
    at = nodes_[at].parent;
    if (nodes_[at].children() != 1) break;
  }
  for (const Handle at : demoted)  // nothing below can fail
    eviction_.demote(nodes_.resolve(at), tiers);
  return demoted;
}

std::uint32_t Tree::expect(std::string_view ns, Bytes key, Account account, double now, double due) {
  require(account > kNobody && account < kAccounts, "account", account, "1 to 254");
  const std::uint32_t pages = nodes_.whole_pages(key);
  nodes_.walk(nodes_.find_root(ns), key, pages, &path_, {});
  if (path_.empty()) return 0;
  Index node = path_.back().node;
  const std::uint32_t found = nodes_[node].start + path_.back().pages;
  while (found == pages && nodes_[node].children() == 1)
    node = nodes_[node].first_child;
  eviction_.expect(node, account, now, due);
  return found;
}

std::vector<Handle> TreeView::path(std::string_view ns, Bytes key) const {
  Walk found;
  nodes_.walk(nodes_.find_root(ns), key, nodes_.whole_pages(key), &found, {});
  std::vector<Handle> handles;
  for (const Step& step : found)
    if (step.pages == nodes_[step.node].pages) handles.push_back(nodes_.handle(step.node));
  return handles;
}

}  // namespace mainstem
