// Matching: how much of a key is in the tree, and how much of that is usable.
#include <algorithm>
#include <array>
#include <cstring>

#include "tree.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kPartialSiblings = 32;  // how many children a partial match tries, youngest first

// The first position where two different byte strings differ, by bisection.
std::size_t difference(const std::uint8_t* a, const std::uint8_t* b, std::size_t n) {
  std::size_t at = 0;
  std::size_t step = 64;
  while (at + step < n && std::memcmp(a + at, b + at, step) == 0) {
    at += step;
    step *= 2;
  }
  n = std::min(n, at + step);
  while (n - at > 16) {
    const std::size_t half = (n - at) / 2;
    if (std::memcmp(a + at, b + at, half) == 0)
      at += half;
    else
      n = at + half;
  }
  while (a[at] == b[at])
    ++at;
  return at;
}

}  // namespace

std::uint32_t Tree::common_pages(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t pages) const {
  const std::size_t bytes = std::size_t{pages} * page_bytes_;
  return std::memcmp(a, b, bytes) == 0 ? pages : static_cast<std::uint32_t>(difference(a, b, bytes) / page_bytes_);
}

// Returns the child of `parent` that begins with this page, and how many of the `pages` pages agree.
Tree::Step Tree::step_down(Index parent, const std::uint8_t* page, std::uint32_t pages) const {
  Step step{kNone, 0};
  const auto agrees = [&](Index node) {
    const Node& n = nodes_[node];
    if (n.parent != parent) return false;
    step.pages = common_pages(n.key.data(), page, std::min(n.pages, pages));
    return step.pages > 0;
  };
  const Node& p = nodes_[parent];
  if (p.branches == Node::kChild) {
    step.node = agrees(p.first_child) ? p.first_child : kNone;
  } else if (p.forks()) {
    const bool first = load_word(page + p.fork_at(), 4) == p.fork_word;
    const Index guess = first ? p.first_child : p.last_child;
    step.node = agrees(guess) ? guess : kNone;
  } else if (p.first_child != kNone) {
    step.node = table_.find(hash(parent, page), agrees);
  }
  return step;
}

// Finds the nodes along the key, as far as the key is in the tree.
void Tree::walk(Index root, Bytes key, std::uint32_t pages, std::vector<Step>* path,
                const CheckRest& check_rest) const {
  path->clear();
  std::uint32_t at = 0;
  for (Index node = root; node != kNone && at < pages;) {
    const Step step = step_down(node, key.data() + std::size_t{at} * page_bytes_, pages - at);
    if (step.node == kNone) break;
    path->push_back(step);
    at += step.pages;
    node = step.pages == nodes_[step.node].pages ? step.node : kNone;
  }
  if (check_rest) check_rest(std::size_t{at} * page_size_);
}

// Computes how far each tier reaches along a walk. For best[t], a cell is usable if it is present on any tier up to t.
Tree::Reach Tree::judge(const std::vector<Step>& path) const {
  Reach reach;
  if (single_cell_) {  // a shortcut for the loop below: a match may end at any present page
    std::size_t at = 0;
    for (; at < path.size() && cell(path[at].node, 0).present(); ++at)
      reach.first += path[at].pages;
    reach.best[0] = reach.first;
    for (; at < path.size() && cell(path[at].node, 0).in_flight(); ++at)
      reach.pending += path[at].pages;
    return reach;
  }
  std::array<Coverage, kMaxComponents * kMaxTiers> cover{};
  bool in_flight_only = true;
  for (const Step& step : path) {
    const Node& n = nodes_[step.node];
    const std::uint32_t end = n.start + step.pages;
    bool pending = false;
    std::array<bool, kMaxComponents> usable{};
    for (std::uint32_t tier = 0; tier < tiers_; ++tier) {
      bool all = true;
      for (std::uint32_t c = 0; c < rows_.size(); ++c) {
        const Cell& at = cell(step.node, slot(c, tier));
        usable[c] = usable[c] || at.present();
        pending = pending || at.in_flight();
        Coverage& coverage = cover[slot(c, tier)];
        coverage.pass(rows_[c], usable[c], end, step.pages == n.pages);
        all = all && coverage.allows(rows_[c], end, page_size_);
      }
      if (all) reach.best[tier] = end;
    }
    if (cover[0].allows(rows_[0], end, page_size_)) reach.first = end;
    if (end > reach.best[tiers_ - 1]) {
      in_flight_only = in_flight_only && pending;
      if (in_flight_only) reach.pending += step.pages;
    } else {  // the match continues past what seemed to end it
      in_flight_only = true;
      reach.pending = 0;
    }
  }
  return reach;
}

// Makes the walk end exactly at `pages`, and splits the node there if needed. Returns that node.
Index Tree::cut(std::vector<Step>* path, std::uint32_t pages) {
  while (!path->empty() && nodes_[path->back().node].start >= pages)
    path->pop_back();
  if (path->empty()) return kNone;
  Step& last = path->back();
  const std::uint32_t inside = pages - nodes_[last.node].start;
  if (inside < nodes_[last.node].pages) last.node = split(last.node, inside);
  last.pages = inside;
  return last.node;
}

// Returns how many symbols of `tail` agree with page `page` of a node; 0 if that page is not on the device.
std::uint32_t Tree::agreement(Index node, std::uint32_t page, Bytes tail) const {
  if (!cell(node, 0).present()) return 0;
  const std::uint8_t* own = nodes_[node].key.data() + std::size_t{page} * page_bytes_;
  const std::size_t bytes = std::min<std::size_t>(tail.size(), page_bytes_);
  const bool same = std::memcmp(own, tail.data(), bytes) == 0;
  return static_cast<std::uint32_t>((same ? bytes : difference(own, tail.data(), bytes)) / symbol_bytes_);
}

// Returns the child of `node` whose first page agrees longest with `tail`, among the youngest.
Tree::Inside Tree::look_inside(Index node, Bytes tail) const {
  Inside best;
  Index at = nodes_[node].last_child;
  for (std::uint32_t seen = 0; at != kNone && seen < kPartialSiblings; ++seen, at = nodes_[at].previous) {
    const std::uint32_t symbols = agreement(at, 0, tail);
    if (symbols > best.symbols) best = {at, symbols};
  }
  return best;
}

void Tree::note_uses(std::uint64_t root, Bytes key) {
  const Index deepest = path_.empty() ? kNone : path_.back().node;
  key = key.first(std::size_t{whole_pages(key)} * page_bytes_);
  for (std::uint32_t tier = 0; tier < tiers_; ++tier)
    replacements_[tier]->asked(root, deepest, key);
  for (const Step& step : path_)
    for (std::uint32_t tier = 0; tier < tiers_; ++tier)
      if (cell(step.node, tier).present()) replacements_[tier]->used(step.node);
}

// Whether a walked key parts from another sequence: neither at the end of a leaf, nor at its own end.
bool Tree::parts_from_another(std::uint32_t pages) const {
  if (path_.empty()) return false;
  const Step& last = path_.back();
  const Node& n = nodes_[last.node];
  return n.start + last.pages < pages && (last.pages < n.pages || n.branches);
}

MatchResult Tree::match(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest) {
  const std::uint32_t pages = whole_pages(key);
  const Index root = find_root(ns);
  walk(root, key, pages, &path_, check_rest);

  MatchResult result;
  ++tick_;
  ++counters_.match_calls;
  counters_.queried_symbols += key.size() / symbol_bytes_;
  if (root == kNone) {
    if (remembers_) note_uses(root_name(ns), key);
    return result;
  }
  const Reach reach = judge(path_);
  const bool parts = has_standings_ && parts_from_another(pages);
  result.pages = reach.best[0];
  result.host_pages = reach.best[tiers_ - 1] - result.pages;
  result.reach_pages = reach.first;
  result.pending_pages = reach.pending;
  const Index deepest = cut(&path_, result.pages + result.host_pages);
  if (remembers_) note_uses(names_[root], key);
  for (const Step& step : path_) {
    ++nodes_[step.node].hits;
    nodes_[step.node].accessed = tick_;
    if (!single_cell_ || &step == &path_.back()) touch(step.node, tick_);  // with one cell, inner nodes are unranked
  }
  const Index node = cut(&path_, result.pages);
  if (parts && node != kNone) nodes_[node].forked = true;
  for (std::size_t s = 0; has_standings_ && s < slots_; ++s)
    note_end(s % tiers_ ? deepest : node, s, kMatched);
  result.host_node = deepest ? handle(deepest) : 0;
  result.node = node ? handle(node) : 0;
  counters_.hit_symbols += std::uint64_t{result.pages} * page_size_;

  if (partial && divides_pages()) {
    const Inside inside = look_inside(node ? node : root, key.subspan(std::size_t{result.pages} * page_bytes_));
    if (inside.node != kNone) {
      result.partial = inside.symbols;
      result.partial_id = cell(inside.node, 0).ids[0];
      result.partial_node = handle(inside.node);
    }
  }
  return result;
}

Handle Tree::locate(std::string_view ns, Bytes key, std::uint32_t pages) {
  const Index root = find_root(ns);
  walk(root, key, std::min(pages, whole_pages(key)), &path_, {});
  if (path_.empty() || nodes_[path_.back().node].start + path_.back().pages < pages) return 0;
  const Index node = cut(&path_, pages);
  return node ? handle(node) : 0;
}

PeekResult Tree::peek(std::string_view ns, Bytes key, bool partial, const CheckRest& check_rest) const {
  const Index root = find_root(ns);
  std::vector<Step> path;
  walk(root, key, whole_pages(key), &path, check_rest);
  if (root == kNone) return {};
  const Reach reach = judge(path);
  const std::uint32_t end = reach.best[0];
  const std::uint32_t host = reach.best[tiers_ - 1] - end;
  if (!partial || !divides_pages()) return {end, host, 0, reach.first};
  while (!path.empty() && nodes_[path.back().node].start >= end)
    path.pop_back();
  const Index node = path.empty() ? root : path.back().node;
  const Bytes tail = key.subspan(std::size_t{end} * page_bytes_);
  const bool within = end < nodes_[node].end();
  const std::uint32_t inside =
      within ? agreement(node, end - nodes_[node].start, tail) : look_inside(node, tail).symbols;
  return {end, host, inside, reach.first};
}

}  // namespace mainstem
