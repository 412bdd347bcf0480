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

// One explanation; reads the parts of a tree.
struct Explainer {
  const Structure& nodes;
  const Residency& cells;
  const Eviction& order;
  Ghosts* ghosts;  // null: what is gone is not remembered

  Explanation explain(std::string_view ns, Bytes key, bool distances);
  std::int64_t last_use(const Walk& path, std::uint32_t pages) const;
  Cause missing(const Walk& path) const;
  Cause cause_here(Index node, Cause missing) const;
  void explain_gone(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from, Explanation* to);
  void explain_parting(Index root, const Walk& path, Bytes key, Explanation* to) const;
  void measure(Explanation* of);
};

Explanation Explainer::explain(std::string_view ns, Bytes key, bool distances) {
  const std::uint32_t pages = nodes.whole_pages(key);
  const Index root = nodes.find_root(ns);
  Walk path;
  if (root != kNone) nodes.walk(root, key, pages, &path, {});
  Explanation found;
  found.tick = order.tick();
  found.horizon = ghosts ? ghosts->horizon() : 0;
  const PeekResult usable = root == kNone ? PeekResult() : PeekResult(cells.reach(path), cells.tiers);
  std::uint32_t at = usable.pages + usable.host_pages;
  const auto here = [&](std::uint32_t begin, std::uint32_t end, Cause cause) {
    if (begin < end) add(&found, {begin, end, cause, 0, {}, -1, last_use(path, end)});
  };
  here(0, usable.pages, Cause::device);
  here(usable.pages, at, Cause::host);
  Cause missing = path.empty() ? Cause::forgotten : this->missing(path);
  for (const Step& step : path) {
    const std::uint32_t end = nodes[step.node].start + step.pages;
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
  if (distances && ghosts && order.tells_recency()) measure(&found);
  return found;
}

// Returns the last use of the last of the first `pages` pages of a path; -1: not known. A use of anything below is a
// use of that page, too, and its node does not record it. So the answer is known only at the end of a branch, where a
// conversation goes on.
std::int64_t Explainer::last_use(const Walk& path, std::uint32_t pages) const {
  for (const Step& step : path) {
    const Node& n = nodes[step.node];
    if (n.end() >= pages) return n.children() || !order.tells_recency() ? -1 : static_cast<std::int64_t>(n.accessed);
  }
  return -1;
}

// Why a match cannot end as far as full attention goes: the component that allows least.
Cause Explainer::missing(const Walk& path) const {
  Cause cause = Cause::window_missing;
  std::uint32_t least = ~std::uint32_t{0};
  for (std::uint32_t c = 0; c < cells.components(); ++c) {
    Coverage cover;
    std::uint32_t most = 0;
    for (const Step& step : path) {
      const Node& n = nodes[step.node];
      bool usable = false;
      for (std::uint32_t tier = 0; tier < cells.tiers; ++tier)
        usable = usable || cells.cell(step.node, cells.column_of(c, tier)).present();
      cover.pass(cells.rows[c], usable, n.start + step.pages, step.pages == n.pages);
      if (cover.allows(cells.rows[c], n.start + step.pages, nodes.page_size)) most = n.start + step.pages;
    }
    const bool is_state = !cells.rows[c].per_page();
    if (most > least || (most == least && !is_state) || (c == 0 && cells.rows[0].leaf_only())) continue;
    least = most;
    cause = is_state ? Cause::state_missing : Cause::window_missing;
  }
  return cause;
}

// Why a page of a node of the tree is not used.
Cause Explainer::cause_here(Index node, Cause missing) const {
  bool present = false, in_flight = false;
  for (std::uint32_t tier = 0; tier < cells.tiers; ++tier) {
    const Cell& cell = cells.cell(node, cells.column_of(0, tier));
    present = present || cell.present();
    in_flight = in_flight || cell.in_flight();
  }
  if (present) return missing;
  if (in_flight) return Cause::in_flight;
  return cells.rows[0].leaf_only() ? Cause::forgotten : Cause::window_missing;
}

// Explains pages without a node. Pages after one that was never seen were never seen, either.
void Explainer::explain_gone(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from, Explanation* to) {
  const std::uint32_t pages = nodes.whole_pages(key);
  if (!ghosts) return add(to, {from, pages, Cause::forgotten});
  const std::vector<Ghosts::Known> known = ghosts->find(ns, key, path, from);
  for (std::uint32_t page = from; page < known.size(); ++page) {
    const bool departed = known[page].kind == Ghosts::Known::departed;
    const Cause cause = departed ? Cause::departed : Cause::forgotten;
    add(to, {page, page + 1, cause, departed ? known[page].number : 0, known[page].departure});
  }
  if (known.size() < pages) add(to, {static_cast<std::uint32_t>(known.size()), pages, Cause::never_seen});
}

// Finds where a prompt parts from the nearest one of the tree: inside the last node of its path, or at a child of it.
void Explainer::explain_parting(Index root, const Walk& path, Bytes key, Explanation* to) const {
  const Step last = path.empty() ? Step{root, 0} : path.back();
  const Bytes tail = key.subspan(std::size_t{to->runs.back().begin} * nodes.page_bytes);
  Index nearest = kNone;
  std::uint32_t inside = 0, symbols = 0;
  if (last.pages < nodes[last.node].pages) {
    nearest = last.node;
    inside = last.pages;
    symbols = nodes.agreement(nearest, inside, tail);
  } else {
    Index at = nodes[last.node].last_child;
    for (std::uint32_t seen = 0; at != kNone && seen < kNearest; ++seen, at = nodes[at].previous) {
      const std::uint32_t agree = nodes.agreement(at, 0, tail);
      if (nearest != kNone && agree <= symbols) continue;
      nearest = at;
      symbols = agree;
    }
  }
  if (nearest == kNone || (to->runs.back().begin == 0 && symbols == 0)) return;
  to->runs.back().cause = Cause::parted;
  to->parted = symbols;
  const std::size_t at = std::size_t{inside} * nodes.page_bytes + std::size_t{symbols} * nodes.symbol_bytes;
  to->other = text(nodes[nearest].key).substr(at, kOtherSymbols * nodes.symbol_bytes);
}

// ---------------------------------------------------------------- stack distances

// The stack distance of a page (Mattson et al. 1970): how many pages LRU would have to hold to have it still. Those are
// the pages used since, of any namespace, and those of its own path that were used with it and come before it, itself
// included. Of a run it is that of the last page. Not known once pages are forgotten that were used later.
void Explainer::measure(Explanation* of) {
  const auto concerns = [](const Explained& run) {
    return run.cause == Cause::departed && run.departure.why != Why::removed;
  };
  if (std::none_of(of->runs.begin(), of->runs.end(), concerns)) return;
  const std::vector<Ghosts::Page> evicted = ghosts->evicted();
  const std::vector<std::uint64_t> used = last_uses(nodes);
  for (Explained& run : of->runs) {
    if (!concerns(run) || ghosts->latest_forgotten() > run.departure.accessed) continue;
    const std::uint64_t since = run.departure.accessed;
    run.distance = 0;
    const auto count = [&](std::uint32_t start, std::uint32_t pages, std::uint64_t accessed) {
      if (accessed > since) run.distance += pages;
      if (accessed == since && start < run.end) run.distance += std::min(pages, run.end - start);
    };
    for (Index node = 1; node < nodes.nodes().size(); ++node)
      if (nodes[node].live && !nodes[node].removed && !nodes[node].root())
        count(nodes[node].start, nodes[node].pages, used[node]);
    for (const Ghosts::Page& page : evicted)
      count(page.number, 1, page.accessed);
  }
}

}  // namespace

Explanation Tree::explain(std::string_view ns, Bytes key, bool distances) {
  return Explainer{nodes_, cells_, eviction_, ghosts_.get()}.explain(ns, key, distances);
}

}  // namespace mainstem
