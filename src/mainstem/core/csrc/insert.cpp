// Insertion: goes down along existing nodes, then adds nodes for the rest.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>

#include "tree.h"

namespace mainstem {

namespace {

// Returns the first page from `start` on that has an id.
std::uint32_t first_id(IdSpan ids, std::uint32_t start) {
  const auto found = std::find_if(ids.begin() + start, ids.end(), [](std::int32_t id) { return id >= 0; });
  return static_cast<std::uint32_t>(found - ids.begin());
}

}  // namespace

// Every component must have the right number of ids, and some component an id at the end of the key.
void Tree::check_tail(const Tail& tail, std::uint32_t pages) const {
  require(tail.ids.size() == rows_.size(), "ids", tail.ids.size(), "one array for each component");
  bool holds_end = pages == 0;
  for (std::size_t c = 0; c < rows_.size(); ++c) {
    IdSpan ids = tail.ids[c];
    if (rows_[c].per_page() && ids.size() != pages)
      throw BadValue{"number of page ids", std::to_string(ids.size()), "one per whole page: " + std::to_string(pages)};
    if (!rows_[c].per_page() && ids.size() > 1)
      throw BadValue{"number of state ids", std::to_string(ids.size()), "0 or 1"};
    if (rows_[c].begins_late()) ids = ids.subspan(first_id(ids, 0));
    holds_end = holds_end || !ids.empty();
    const std::int32_t signs = std::accumulate(ids.begin(), ids.end(), 0, std::bit_or<>());
    if (signs < 0) {
      const std::int32_t least = *std::min_element(ids.begin(), ids.end());
      throw BadValue{"page id", std::to_string(least), "0 or more"};
    }
  }
  if (!holds_end) throw BadValue{"ids", "none", "an id of some component at the end of the key"};
}

// Whether the key begins with the path to a node. Reads the whole prefix.
bool Tree::lies_on(std::string_view ns, Bytes key, Handle handle) const {
  Index node = resolve(handle);
  if (node == kNone) return true;
  if (std::size_t{nodes_[node].end()} * page_bytes_ > key.size()) return false;
  for (; !nodes_[node].root(); node = nodes_[node].parent) {
    const Run<std::uint8_t>& run = nodes_[node].key;
    const std::uint8_t* there = key.data() + std::size_t{nodes_[node].start} * page_bytes_;
    if (std::memcmp(run.data(), there, run.size()) != 0) return false;
  }
  return node == find_root(ns);
}

bool Tree::knows(std::string_view ns, Handle after, Bytes key) const {
  const Index from = resolve(after) ? resolve(after) : find_root(ns);
  return from != kNone && key.size() >= page_bytes_ && step_down(from, key.data(), 1).node != kNone;
}

// Whether an insertion must stop before this node: another transfer's pages are in flight here, or the insertion is a
// transfer itself and the node has a hole that only present pages may fill. With `past_flights` it stops neither at
// pages in flight nor at a node that a cancelled transfer left empty.
bool Tree::blocked(Index node, const Tail& tail, std::uint32_t page, std::uint32_t tier, bool ready,
                   bool past_flights) const {
  for (std::uint32_t c = 0; c < rows_.size(); ++c) {
    const Cell& at = cell(node, slot(c, tier));
    if (at.in_flight() && !past_flights) return true;
    if (!ready && at.absent() && rows_[c].per_page() && tail.ids[c][page] >= 0)
      return !past_flights || !has_no_pages(node);
  }
  return false;
}

// Whether a node and its children hold nothing, as after a cancelled transfer.
bool Tree::has_no_pages(Index node) const {
  for (Index at = nodes_[node].first_child; at != kNone; at = nodes_[at].next)
    if (!empty(at)) return false;
  return empty(node);
}

// Goes down along the tail from `node`, as far as the tree has it and nothing blocks; splits where the key parts, or
// where a window's ids begin. Returns the last node, and whether the next one is blocked.
std::pair<Index, bool> Tree::descend(Index node, const Tail& tail, std::uint32_t tier, std::int32_t priority,
                                     bool ready, bool past_flights) {
  const std::uint32_t pages = whole_pages(tail.key);
  for (std::uint32_t at = 0; at < pages; at += nodes_[node].pages) {
    auto [next, length] = step_down(node, tail.key.data() + std::size_t{at} * page_bytes_, pages - at);
    if (next == kNone) break;
    if (blocked(next, tail, at, tier, ready, past_flights)) return {node, true};
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].begins_late() && tail.ids[c][at] < 0 && cell(next, slot(c, tier)).absent())
        length = std::min(length, first_id(tail.ids[c], at) - at);
    if (length < nodes_[next].pages) next = split(next, length);
    nodes_[next].priority = std::max(nodes_[next].priority, priority);
    touch(next, tick_);
    node = next;
  }
  return {node, false};
}

// Collects the absent cells that will get ids, from `node` up to `top`, after which the tail begins.
void Tree::note_fills(Index node, Index top, const Tail& tail, std::uint32_t tier, std::vector<Fill>* fills) const {
  for (; node != top; node = nodes_[node].parent) {
    const std::uint32_t at = nodes_[node].start - nodes_[top].end();
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      const bool wanted = rows_[c].per_page() && tail.ids[c][at] >= 0 && cell(node, slot(c, tier)).absent();
      if (wanted) fills->push_back({node, c, Run<std::int32_t>(tail.ids[c].data() + at, nodes_[node].pages)});
    }
  }
}

// Cuts the rest of the tail into new nodes after `node`: one, or more where a window's ids begin or where pages have
// different histories. The tail starts at page `begin`.
void Tree::cut_pieces(Index node, std::uint32_t begin, const Tail& tail, std::uint32_t tier, bool locked,
                      std::vector<Piece>* pieces) const {
  std::uint32_t at = nodes_[node].end() - begin;
  std::uint64_t name = remembers_ ? names_[node] : 0;
  for (const std::uint32_t pages = whole_pages(tail.key); at < pages; at = pieces->back().end) {
    const Bytes rest{tail.key.data() + std::size_t{at} * page_bytes_, std::size_t{pages - at} * page_bytes_};
    Piece& piece = pieces->emplace_back();
    piece.end = remembers_ ? at + replacements_[tier]->alike_pages(name, begin + at, rest) : pages;
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].begins_late()) {
        if (tail.ids[c][at] < 0) piece.end = std::min(piece.end, first_id(tail.ids[c], at));
        // A lock must begin at a node boundary.
        const std::uint32_t first = rows_[c].first_needed(begin + pages, page_size_);
        if (locked && first > begin + at) piece.end = std::min(piece.end, first - begin);
      }
    const std::uint32_t length = piece.end - at;
    if (remembers_ && piece.end < pages) name = Identity::of(name, rest.data(), length, page_bytes_);
    piece.key = Run<std::uint8_t>(rest.data(), std::size_t{length} * page_bytes_);
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].per_page() && tail.ids[c][at] >= 0)
        piece.ids[c] = Run<std::int32_t>(tail.ids[c].data() + at, length);
  }
}

// Adds the pieces below `node`. Returns the last one, which names their transfer if they are in flight.
Index Tree::append_pieces(Index node, std::vector<Piece>* pieces, std::uint32_t tier, std::int32_t priority,
                          bool ready) {
  reserve_nodes(pieces->size());  // nothing below can fail
  for (Piece& piece : *pieces)
    piece.node = node = add_child(node, std::move(piece.key), priority);
  for (Piece& piece : *pieces) {
    counters_.inserted_pages += nodes_[piece.node].pages;
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (piece.ids[c].size()) occupy(piece.node, slot(c, tier), std::move(piece.ids[c]), ready ? kNone : node);
  }
  return node;
}

// Resets a node that holds nothing because its transfer was cancelled.
void Tree::renew(Index node, std::int32_t priority) {
  Node& n = nodes_[node];
  n.created = n.accessed = tick_;
  n.hits = 0;
  n.priority = priority;
  n.forked = false;
}

InsertResult Tree::insert(std::string_view ns, Handle after, Tail tail, std::int32_t priority, std::uint32_t tier,
                          bool ready, bool to_be_locked, bool past_flights) {
  const bool locked = to_be_locked || !ready;  // what is in flight is locked
  const std::uint32_t pages = whole_pages(tail.key);
  require_tier(tier);
  const Index from = resolve(after);
  const std::uint32_t begin = from ? nodes_[from].end() : 0;
  require(pages <= std::numeric_limits<std::uint32_t>::max() - begin, "pages", pages, "below 2**32 in all");
  check_tail(tail, pages);
  for (std::uint32_t c = 0; from && c < rows_.size(); ++c) {
    const Cell& at = cell(from, slot(c, tier));
    if (at.in_flight() && !past_flights) throw BadValue{"after", std::to_string(after), "a node not in flight"};
    if (at.absent() && rows_[c].leaf_only())
      throw BadValue{"after", std::to_string(after), "a node that is present on this tier"};
  }

  ++tick_;
  ++counters_.insert_calls;
  InsertResult result{after, begin + pages, begin + pages, 0};
  if (result.pages == 0) return result;

  // First do everything that can fail, then everything that changes what the tree holds.
  Index node = from ? from : make_root(ns);
  std::vector<Fill> fills, states;
  pieces_.clear();
  bool grown = false;
  try {
    bool stopped;
    const Index top = node;
    std::tie(node, stopped) = descend(node, tail, tier, priority, ready, past_flights);
    const std::uint32_t end = stopped ? nodes_[node].end() : result.pages;
    for (std::uint32_t c = 0; c < rows_.size() && locked; ++c)
      if (rows_[c].begins_late()) split_at(node, rows_[c].first_needed(end, page_size_));
    note_fills(node, top, tail, tier, &fills);
    if (!stopped) cut_pieces(node, begin, tail, tier, locked, &pieces_);
    for (std::uint32_t c = 0; c < rows_.size() && !stopped; ++c)
      if (!rows_[c].per_page() && !tail.ids[c].empty())
        states.push_back({kNone, c, Run<std::int32_t>(tail.ids[c].data(), 1)});
    if (!pieces_.empty()) {
      result.existing = nodes_[node].end();
      node = append_pieces(node, &pieces_, tier, priority, ready);
      grown = true;
    }
  } catch (...) {
    reap(node);  // a root created for this insertion
    throw;
  }
  std::array<bool, kMaxComponents> others{};  // cells already in flight at the end are already locked
  for (std::uint32_t c = 0; c < rows_.size(); ++c)
    others[c] = !grown && cell(node, slot(c, tier)).transfer == node;
  for (Fill& fill : fills) {
    if (fill.component == 0) result.existing = std::min(result.existing, nodes_[fill.node].start);
    if (fill.component == 0) counters_.inserted_pages += fill.ids.size();
    if (empty(fill.node)) renew(fill.node, priority);
    occupy(fill.node, slot(fill.component, tier), std::move(fill.ids), ready ? kNone : node);
  }
  for (Fill& state : states) {  // at the end of what was inserted
    const std::size_t s = slot(state.component, tier);
    if (!cell(node, s).absent()) continue;
    occupy(node, s, std::move(state.ids), ready ? kNone : node);
    result.states |= 1u << state.component;
  }
  for (std::uint32_t c = 0; has_standings_ && c < rows_.size(); ++c) {
    if (from) pass_window(from, slot(c, tier));
    end_window(node, slot(c, tier), kInserted);
  }
  for (std::uint32_t c = 0; c < rows_.size() && !ready; ++c)
    if (cell(node, slot(c, tier)).transfer == node && !others[c]) lock_all(node, tier, +1);
  if (grown) join(node);

  result.node = handle(node);
  result.pages = nodes_[node].end();
  result.existing = std::min(result.existing, result.pages);
  if (nodes_[node].root()) reap(node);  // blocked before the first page
  return result;
}

}  // namespace mainstem
