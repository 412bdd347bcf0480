// Insertion: goes down along existing nodes, then adds nodes for the rest.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>

#include "tree/tree.h"

namespace mainstem {

namespace {

// Returns the first page from `start` on that has an id.
std::uint32_t first_id(IdSpan ids, std::uint32_t start) {
  const auto found = std::find_if(ids.begin() + start, ids.end(), [](std::int32_t id) { return id >= 0; });
  return static_cast<std::uint32_t>(found - ids.begin());
}

}  // namespace

// One insertion: prepare() does everything that can fail and adds nodes, fill() fills the cells that were absent.
struct Tree::Insertion {
  struct Fill {  // ids for a cell that is absent so far
    Index node;
    std::uint32_t component;
    Run<std::int32_t> ids;
    bool anew = false;  // nothing is held or locked in the node or below
  };

  void check();
  void prepare(std::string_view ns);
  void fill();

  bool blocked(Index at, std::uint32_t page) const;
  bool descend();
  void note_fills();
  void make_pieces();
  void append_pieces();
  bool has_id(std::uint32_t component, std::uint32_t page) const { return tail.ids[component][page] >= 0; }
  std::size_t column(std::uint32_t component) const { return tree.cells_.column_of(component, tier); }
  Cell& cell(Index at, std::uint32_t component) { return tree.cells_.cell(at, column(component)); }
  const Cell& cell(Index at, std::uint32_t component) const { return tree.cells_.cell(at, column(component)); }

  Tree& tree;
  const Tail& tail;
  const Index from;  // kNone: the root
  const std::uint32_t pages, begin, tier;
  const std::int32_t priority;
  const bool ready, locked, past_flights;
  const std::vector<Component>& rows = tree.cells_.rows;
  Index top = kNone, node = kNone;  // where the tail begins, and the last node so far
  bool grown = false;
  bool nothing = false;  // the tail has no ids
  std::uint32_t existing = 0, states_adopted = 0;
  std::vector<Fill> fills{}, states{};
};

// Every component must have the right number of ids, and some component an id at the end of the key, unless a match
// that ends there needs none.
void Tree::Insertion::check() {
  require(tail.ids.size() == rows.size(), "ids", tail.ids.size(), "one array for each component");
  nothing = true;
  bool needed = false;
  for (std::size_t c = 0; c < rows.size(); ++c) {
    IdSpan ids = tail.ids[c];
    if (rows[c].per_page() && ids.size() != pages)
      throw BadValue{"number of page ids", std::to_string(ids.size()), "one per whole page: " + std::to_string(pages)};
    if (!rows[c].per_page() && ids.size() > 1)
      throw BadValue{"number of state ids", std::to_string(ids.size()), "0 or 1"};
    if (rows[c].begins_late()) ids = ids.subspan(first_id(ids, 0));
    nothing = nothing && ids.empty();
    needed = needed || rows[c].needs_before(begin + pages, tree.nodes_.page_size);
    const std::int32_t signs = std::accumulate(ids.begin(), ids.end(), 0, std::bit_or<>());
    if (signs < 0) {
      const std::int32_t least = *std::min_element(ids.begin(), ids.end());
      throw BadValue{"page id", std::to_string(least), "0 or more"};
    }
  }
  if (pages && nothing && needed) throw BadValue{"ids", "none", "an id of some component at the end of the key"};
  for (std::uint32_t c = 0; from && c < rows.size(); ++c) {
    const Cell& at = cell(from, c);
    const auto refuse = [&](const char* allowed) {
      throw BadValue{"after", std::to_string(tree.nodes_.handle(from)), allowed};
    };
    if (at.in_flight() && !past_flights) refuse("a node not in flight");
    if (at.absent() && rows[c].leaf_only()) refuse("a node that is present on this tier");
  }
}

// Whether an insertion must stop before this node: another transfer's pages are in flight here, or the insertion is a
// transfer itself and the node has a hole that only present pages may fill. With `past_flights` it stops neither at
// pages in flight nor at a node that a cancelled transfer left empty.
bool Tree::Insertion::blocked(Index at, std::uint32_t page) const {
  for (std::uint32_t c = 0; c < rows.size(); ++c) {
    if (cell(at, c).in_flight() && !past_flights) return true;
    if (!ready && cell(at, c).absent() && rows[c].per_page() && has_id(c, page))
      return !past_flights || !tree.cells_.empty_with_children(at);
  }
  return false;
}

// Goes down along the tail, as far as the tree has it and nothing blocks; splits where the key parts, or where a
// window's ids begin. Returns whether the next node is blocked.
bool Tree::Insertion::descend() {
  const Structure& nodes = tree.nodes_;
  for (std::uint32_t at = 0; at < pages; at += nodes[node].pages) {
    auto [next, length] = nodes.step_down(node, tail.key.data() + std::size_t{at} * nodes.page_bytes, pages - at);
    if (next == kNone) break;
    if (blocked(next, at)) return true;
    for (std::uint32_t c = 0; c < rows.size(); ++c)
      if (rows[c].begins_late() && !has_id(c, at) && cell(next, c).absent())
        length = std::min(length, first_id(tail.ids[c], at) - at);
    if (length < nodes[next].pages) next = tree.split(next, length);
    tree.eviction_.visited(next, priority);
    node = next;
  }
  return false;
}

// Collects the absent cells that will get ids.
void Tree::Insertion::note_fills() {
  for (Index at = node; at != top; at = tree.nodes_[at].parent) {
    const std::uint32_t page = tree.nodes_[at].start - begin;
    for (std::uint32_t c = 0; c < rows.size(); ++c)
      if (rows[c].per_page() && has_id(c, page) && cell(at, c).absent())
        fills.push_back(
            {at, c, Run<std::int32_t>(tail.ids[c].data() + page, tree.nodes_[at].pages), tree.cells_.unused_from(at)});
  }
}

// Divides the rest of the tail into new nodes: one, or more where a window's ids begin or where pages have different
// histories.
void Tree::Insertion::make_pieces() {
  Eviction& eviction = tree.eviction_;
  const std::uint32_t page_bytes = tree.nodes_.page_bytes;
  std::uint32_t at = tree.nodes_[node].end() - begin;
  std::uint64_t name = eviction.remembers() ? eviction.name(node) : 0;
  for (; at < pages; at = tree.pieces_.back().end) {
    const Bytes rest = tail.key.subspan(std::size_t{at} * page_bytes, std::size_t{pages - at} * page_bytes);
    Piece& piece = tree.pieces_.emplace_back();
    piece.end = eviction.remembers() ? at + eviction.alike_pages(name, tier, begin + at, rest) : pages;
    for (std::uint32_t c = 0; c < rows.size(); ++c)
      if (rows[c].begins_late()) {
        if (!has_id(c, at)) piece.end = std::min(piece.end, first_id(tail.ids[c], at));
        // A lock must begin at a node boundary.
        const std::uint32_t first = rows[c].first_locked(begin + pages, tree.nodes_.page_size);
        if (locked && first > begin + at) piece.end = std::min(piece.end, first - begin);
      }
    const std::uint32_t length = piece.end - at;
    if (eviction.remembers() && piece.end < pages) name = PageName::of(name, rest.data(), length, page_bytes);
    piece.key = Structure::Key(rest.data(), std::size_t{length} * page_bytes);
    for (std::uint32_t c = 0; c < rows.size(); ++c)
      if (rows[c].per_page() && has_id(c, at)) piece.ids[c] = Run<std::int32_t>(tail.ids[c].data() + at, length);
  }
}

// Adds the pieces below the last node. The last of them names their transfer if they are in flight.
void Tree::Insertion::append_pieces() {
  std::vector<Piece>& pieces = tree.pieces_;
  tree.reserve(pieces.size());  // nothing below can fail
  grown = true;
  existing = tree.nodes_[node].end();
  for (Piece& piece : pieces)
    piece.node = node = tree.add_child(node, std::move(piece.key), priority);
  for (Piece& piece : pieces) {
    tree.counters_.inserted_pages += tree.nodes_[piece.node].pages;
    for (std::uint32_t c = 0; c < rows.size(); ++c)
      if (piece.ids[c].size()) tree.occupy(piece.node, column(c), std::move(piece.ids[c]), ready ? kNone : node);
  }
}

void Tree::Insertion::prepare(std::string_view ns) {
  existing = begin + pages;
  tree.pieces_.clear();
  top = node = from ? from : tree.make_root(ns);
  try {
    const bool stopped = descend() || nothing;
    const std::uint32_t end = stopped ? tree.nodes_[node].end() : existing;
    for (std::uint32_t c = 0; c < rows.size() && locked; ++c)
      if (rows[c].begins_late()) tree.split_at(node, rows[c].first_locked(end, tree.nodes_.page_size));
    note_fills();
    if (!stopped) make_pieces();
    for (std::uint32_t c = 0; c < rows.size() && !stopped; ++c)
      if (!rows[c].per_page() && !tail.ids[c].empty())
        states.push_back({kNone, c, Run<std::int32_t>(tail.ids[c].data(), 1)});
    if (!tree.pieces_.empty()) append_pieces();
  } catch (...) {
    tree.reap(node);  // a root created for this insertion
    throw;
  }
}

void Tree::Insertion::fill() {
  const Index transfer = ready ? kNone : node;
  std::array<bool, kMaxComponents> others{};  // cells already in flight at the end are already locked
  for (std::uint32_t c = 0; c < rows.size(); ++c)
    others[c] = !grown && cell(node, c).transfer == node;
  for (Fill& fill : fills) {
    if (fill.component == 0) existing = std::min(existing, tree.nodes_[fill.node].start);
    if (fill.component == 0) tree.counters_.inserted_pages += fill.ids.size();
    if (fill.anew) tree.eviction_.renew(fill.node, priority);
    tree.occupy(fill.node, column(fill.component), std::move(fill.ids), transfer);
  }
  for (Fill& state : states) {  // at the end of what was inserted
    if (!cell(node, state.component).absent()) continue;
    tree.occupy(node, column(state.component), std::move(state.ids), transfer);
    states_adopted |= 1u << state.component;
  }
  for (std::uint32_t c = 0; tree.eviction_.has_standings() && c < rows.size(); ++c) {
    if (from) tree.eviction_.pass_window(from, column(c));
    tree.eviction_.end_window(node, column(c), kInserted);
  }
  for (std::uint32_t c = 0; c < rows.size() && !ready; ++c)
    if (cell(node, c).transfer == node && !others[c]) tree.lock_all(node, tier, +1);
  if (grown) tree.join(node);
}

InsertResult Tree::insert(std::string_view ns, Handle after, Tail tail, std::int32_t priority, std::uint32_t tier,
                          bool ready, bool to_be_locked, bool past_flights) {
  const std::uint32_t pages = nodes_.whole_pages(tail.key);
  cells_.require_tier(tier);
  const Index from = nodes_.resolve(after);
  const std::uint32_t begin = from ? nodes_[from].end() : 0;
  require(pages <= std::numeric_limits<std::uint32_t>::max() - begin, "pages", pages, "below 2**32 in all");
  const bool locked = to_be_locked || !ready;  // what is in flight is locked
  Insertion insertion{*this, tail, from, pages, begin, tier, priority, ready, locked, past_flights};
  insertion.check();

  eviction_.advance();
  ++counters_.insert_calls;
  if (begin + pages == 0) return {after, 0, 0, 0};
  insertion.prepare(ns);
  insertion.fill();

  const Index node = insertion.node;
  const std::uint32_t end = nodes_[node].end();
  const InsertResult result{nodes_.handle(node), end, std::min(insertion.existing, end), insertion.states_adopted};
  if (nodes_[node].root()) reap(node);  // blocked before the first page
  return result;
}

bool TreeView::knows(std::string_view ns, Handle after, Bytes key) const {
  const Index from = nodes_.resolve(after) ? nodes_.resolve(after) : nodes_.find_root(ns);
  return from != kNone && key.size() >= nodes_.page_bytes && nodes_.step_down(from, key.data(), 1).node != kNone;
}

}  // namespace mainstem
