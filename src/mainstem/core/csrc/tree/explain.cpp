// Explaining: where the pages of a key are, and why the others are nowhere.
#include <algorithm>

#include "tree/tree.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kNearest = 4096;   // children that are compared to find the nearest key, youngest first
constexpr std::size_t kOtherSymbols = 32;  // of the nearest key that are shown

void add(Explanation* to, const Explained& run) {
  if (!to->runs.empty()) {
    Explained& last = to->runs.back();
    if (last.cause == run.cause && last.number == run.number && last.end == run.begin) {
      last.end = run.end;
      return;
    }
  }
  to->runs.push_back(run);
}

// By node: the last use of it or of anything below, which uses what is above.
std::vector<std::uint64_t> last_uses(const Structure& nodes) {
  std::vector<std::uint64_t> used(nodes.nodes().size(), 0);
  std::vector<Index> order;
  for (Index root = 1; root < nodes.nodes().size(); ++root)
    if (nodes[root].live && nodes[root].root())
      nodes.every_from(root, [&](Index node) {
        used[node] = nodes[node].accessed;
        order.push_back(node);
        return true;
      });
  for (auto at = order.rbegin(); at != order.rend(); ++at)
    if (!nodes[*at].root()) used[nodes[*at].parent] = std::max(used[nodes[*at].parent], used[*at]);
  return used;
}

}  // namespace

Explanation Tree::explain(std::string_view ns, Bytes key, bool distances) {
  const std::uint32_t pages = nodes_.whole_pages(key);
  const Index root = nodes_.find_root(ns);
  Walk path;
  if (root != kNone) nodes_.walk(root, key, pages, &path, {});
  Explanation found;
  found.tick = eviction_.tick();
  found.horizon = ghosts_ ? ghosts_->horizon() : 0;
  const PeekResult usable = root == kNone ? PeekResult() : PeekResult(cells_.reach(path), cells_.tiers);
  std::uint32_t at = usable.pages + usable.host_pages;
  const auto here = [&](std::uint32_t begin, std::uint32_t end, Cause cause) {
    if (begin < end) add(&found, {begin, end, cause, 0, {}, -1, last_use(path, end)});
  };
  here(0, usable.pages, Cause::device);
  here(usable.pages, at, Cause::host);
  Cause missing = path.empty() ? Cause::forgotten : this->missing(path);
  for (const Step& step : path) {
    const std::uint32_t end = nodes_[step.node].start + step.pages;
    if (end <= at) continue;
    const Cause cause = cause_here(step.node, missing);
    if (cause == Cause::in_flight) missing = cause;  // what follows waits for it
    add(&found, {at, end, cause});
    at = end;
  }
  if (at < pages) {
    explain_gone(ns, key, path, at, &found);
    if (found.runs.back().cause == Cause::never_seen && found.runs.back().begin == at && root != kNone)
      explain_parting(root, path, key, &found);
  }
  if (distances && ghosts_ && eviction_.tells_recency()) measure(&found);
  return found;
}

// When the last of the first pages of a path was used last. Who uses what is below uses that page, too, and a node does
// not know of it: so it is known at the end of a branch alone, where a conversation goes on.
std::int64_t Tree::last_use(const Walk& path, std::uint32_t pages) const {
  for (const Step& step : path) {
    const Node& n = nodes_[step.node];
    if (n.end() >= pages) return n.children() || !tells_recency() ? -1 : static_cast<std::int64_t>(n.accessed);
  }
  return -1;
}

// Why a match cannot end as far as full attention goes: the component that allows least.
Cause Tree::missing(const Walk& path) const {
  Cause cause = Cause::window_missing;
  std::uint32_t least = ~std::uint32_t{0};
  for (std::uint32_t c = 0; c < cells_.components(); ++c) {
    Coverage cover;
    std::uint32_t most = 0;
    for (const Step& step : path) {
      const Node& n = nodes_[step.node];
      bool usable = false;
      for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier)
        usable = usable || cells_.cell(step.node, cells_.column_of(c, tier)).present();
      cover.pass(cells_.rows[c], usable, n.start + step.pages, step.pages == n.pages);
      if (cover.allows(cells_.rows[c], n.start + step.pages, nodes_.page_size)) most = n.start + step.pages;
    }
    const bool is_state = !cells_.rows[c].per_page();
    if (most > least || (most == least && !is_state) || (c == 0 && cells_.rows[0].leaf_only())) continue;
    least = most;
    cause = is_state ? Cause::state_missing : Cause::window_missing;
  }
  return cause;
}

// Why a page of a node of the tree is not used.
Cause Tree::cause_here(Index node, Cause missing) const {
  bool present = false, in_flight = false;
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
    const Cell& cell = cells_.cell(node, cells_.column_of(0, tier));
    present = present || cell.present();
    in_flight = in_flight || cell.in_flight();
  }
  if (present) return missing;
  if (in_flight) return Cause::in_flight;
  return cells_.rows[0].leaf_only() ? Cause::forgotten : Cause::window_missing;
}

// Pages of which the tree has no node. What follows a page that was never seen was never seen, either.
void Tree::explain_gone(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from, Explanation* to) {
  const std::uint32_t pages = nodes_.whole_pages(key);
  if (!ghosts_) return add(to, {from, pages, Cause::forgotten});
  const std::vector<Ghosts::Known> known = ghosts_->find(ns, key, path, from);
  for (std::uint32_t page = from; page < known.size(); ++page) {
    const bool departed = known[page].kind == Ghosts::Known::departed;
    const Cause cause = departed ? Cause::departed : Cause::forgotten;
    add(to, {page, page + 1, cause, departed ? known[page].number : 0, known[page].departure});
  }
  if (known.size() < pages) add(to, {static_cast<std::uint32_t>(known.size()), pages, Cause::never_seen});
}

// Where a prompt parts from the nearest one that the tree has: inside the node that it leaves, or from a child of it.
void Tree::explain_parting(Index root, const Walk& path, Bytes key, Explanation* to) const {
  const Step last = path.empty() ? Step{root, 0} : path.back();
  const Bytes tail = key.subspan(std::size_t{to->runs.back().begin} * nodes_.page_bytes);
  Index nearest = kNone;
  std::uint32_t inside = 0, symbols = 0;
  if (last.pages < nodes_[last.node].pages) {
    nearest = last.node;
    inside = last.pages;
    symbols = nodes_.agreement(nearest, inside, tail);
  } else {
    Index at = nodes_[last.node].last_child;
    for (std::uint32_t seen = 0; at != kNone && seen < kNearest; ++seen, at = nodes_[at].previous) {
      const std::uint32_t agree = nodes_.agreement(at, 0, tail);
      if (nearest != kNone && agree <= symbols) continue;
      nearest = at;
      symbols = agree;
    }
  }
  if (nearest == kNone || (to->runs.back().begin == 0 && symbols == 0)) return;
  to->runs.back().cause = Cause::parted;
  to->parted = symbols;
  const std::size_t at = std::size_t{inside} * nodes_.page_bytes + std::size_t{symbols} * nodes_.symbol_bytes;
  to->other = text(nodes_[nearest].key).substr(at, kOtherSymbols * nodes_.symbol_bytes);
}

// ---------------------------------------------------------------- stack distances

// The stack distance of a page (Mattson et al. 1970): how many pages LRU would have to hold to have it still. Those are
// the pages used since, of any namespace, and those of its own path that were used with it and come before it, itself
// included. Of a run it is that of the last page. Not known once pages are forgotten that were used later.
void Tree::measure(Explanation* of) {
  const auto concerns = [](const Explained& run) {
    return run.cause == Cause::departed && run.departure.why != Why::removed;
  };
  if (std::none_of(of->runs.begin(), of->runs.end(), concerns)) return;
  const std::vector<Ghosts::Page> evicted = ghosts_->evicted();
  const std::vector<std::uint64_t> used = last_uses(nodes_);
  for (Explained& run : of->runs) {
    if (!concerns(run) || ghosts_->latest_forgotten() > run.departure.accessed) continue;
    const std::uint64_t since = run.departure.accessed;
    run.distance = 0;
    const auto count = [&](std::uint32_t start, std::uint32_t pages, std::uint64_t accessed) {
      if (accessed > since) run.distance += pages;
      if (accessed == since && start < run.end) run.distance += std::min(pages, run.end - start);
    };
    for (Index node = 1; node < nodes_.nodes().size(); ++node)
      if (nodes_[node].live && !nodes_[node].removed && !nodes_[node].root())
        count(nodes_[node].start, nodes_[node].pages, used[node]);
    for (const Ghosts::Page& page : evicted)
      count(page.number, 1, page.accessed);
  }
}

}  // namespace mainstem
