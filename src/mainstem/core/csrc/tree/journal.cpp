#include "tree/journal.h"

#include <algorithm>
#include <cassert>

namespace mainstem {

namespace {

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kSpaceBytes = 64;  // room for the name of a namespace with each page

SipKey key_at(std::string_view key, std::size_t at) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(key.data()) + at;
  return {load_word(bytes), load_word(bytes + 8)};
}

}  // namespace

Journal::Journal(const Structure& nodes, const Residency& cells, std::string_view key,
                 const std::vector<std::uint32_t>& places, std::size_t limit)
    : nodes_(nodes), cells_(cells) {
  require(nodes.size() == 0, "nodes", nodes.size(), "none: a journal begins with an empty tree");
  require(key.size() == kKeyBytes, "bytes of the key", key.size(), "32");
  require(places.size() == cells.tiers, "places", places.size(), "a number for each tier");
  require(limit > 0, "limit", limit, "1 or more");
  if (!cells.rows[0].leaf_only()) throw BadValue{"components", "no full attention", "full attention first"};
  of_pages_ = key_at(key, 0);
  of_spaces_ = key_at(key, kKeyBytes / 2);
  for (const std::uint32_t ids : places)
    hashes_.emplace_back(ids);
  if (places.size() > kHost) in_storage_.resize(places[kHost]);
  // Room for everything that may be noted, so that noting cannot fail.
  noted_.moves.reserve(limit);
  noted_.hashes.reserve(limit);
  noted_.bytes.reserve(limit * (nodes.page_bytes + kSpaceBytes));
}

// ---------------------------------------------------------------- what the tree notes

void Journal::came(Index node, std::size_t column) noexcept {
  if (!concerns(column)) return;
  const auto tier = static_cast<std::uint32_t>(column);
  const Node& n = nodes_[node];
  const Cell& cell = cells_.cell(node, column);
  std::uint64_t hash = hash_of_end(n.parent);
  for (std::uint32_t page = 0; page < n.pages; ++page) {
    hash = SipHash::of(of_pages_, hash, n.key.data() + std::size_t{page} * nodes_.page_bytes, nodes_.page_bytes);
    assert(static_cast<std::size_t>(cell.ids[page]) < hashes_[tier].size());
    hashes_[tier][static_cast<std::size_t>(cell.ids[page])] = hash;
    if (tier == kHost) in_storage_[static_cast<std::size_t>(cell.ids[page])] = false;
  }
  if (cell.present()) arrived(node, column);
}

void Journal::arrived(Index node, std::size_t column) noexcept {
  const Node& n = nodes_[node];
  if (!concerns(column) || n.removed) return;
  if (has_room(n.pages, nodes_[nodes_.root_of(node)].key.size() + n.key.size()))
    note_stored(&noted_, node, static_cast<std::uint32_t>(column), static_cast<std::uint32_t>(column), 0);
}

void Journal::left(Index node, std::size_t column, IdSpan ids) noexcept {
  if (!concerns(column) || nodes_[node].removed) return;
  note_left(static_cast<std::uint32_t>(column), static_cast<std::uint32_t>(column), ids);
}

void Journal::written(Index node, std::uint32_t begin) noexcept {
  bool below = false;  // whether pages from `start` on were noted, and the one before may have to be noted, too
  std::uint32_t start = 0;
  const auto add_above = [&](Index above) {
    if (below && start > nodes_[above].start && !is_in_storage(above, start - nodes_[above].start - 1))
      note_above(above, start);
    below = false;
  };
  for (; !nodes_[node].root() && nodes_[node].end() > begin; node = nodes_[node].parent) {
    const Node& n = nodes_[node];
    const Cell& cell = cells_.cell(node, kHost);
    if (n.removed || !cell.present()) {
      add_above(node);
      continue;
    }
    const std::uint32_t from = std::max(begin, n.start) - n.start;
    if (has_room(n.pages - from, nodes_[nodes_.root_of(node)].key.size() + n.key.size())) {
      note_stored(&noted_, node, kHost, kStorage, from);
      for (std::uint32_t page = from; page < n.pages; ++page)
        in_storage_[static_cast<std::size_t>(cell.ids[page])] = true;
    }
    below = true;
    start = n.start + from;
    if (from) add_above(node);
  }
  if (!nodes_[node].root()) add_above(node);
}

bool Journal::is_in_storage(Index node, std::uint32_t page) const {
  const Cell& cell = cells_.cell(node, kHost);
  return !cell.absent() && in_storage_[static_cast<std::size_t>(cell.ids[page])];
}

// All pages of a path up to `end`, which is in a node or at its end.
void Journal::note_above(Index node, std::uint32_t end) noexcept {
  const Structure::Key& space = nodes_[nodes_.root_of(node)].key;
  const std::size_t size = std::size_t{end} * nodes_.page_bytes;
  if (!has_room(end, space.size() + size)) return;
  const std::size_t at = noted_.bytes.size() + space.size();
  noted_.moves.push_back({true, kAbove, 0, 0, noted_.bytes.size(), at, noted_.hashes.size(), end});
  noted_.bytes.insert(noted_.bytes.end(), space.data(), space.data() + space.size());
  noted_.bytes.resize(at + size);
  for (; !nodes_[node].root(); node = nodes_[node].parent) {
    const Node& n = nodes_[node];
    const std::size_t own = std::size_t{std::min(n.end(), end) - n.start} * nodes_.page_bytes;
    std::copy_n(n.key.data(), own, noted_.bytes.data() + at + std::size_t{n.start} * nodes_.page_bytes);
  }
  std::uint64_t hash = hash_of_end(node);
  for (std::uint32_t page = 0; page < end; ++page) {
    hash = SipHash::of(of_pages_, hash, noted_.bytes.data() + at + std::size_t{page} * nodes_.page_bytes,
                       nodes_.page_bytes);
    noted_.hashes.push_back(hash);
  }
}

void Journal::deleted(Index node) noexcept {
  if (cells_.tiers > kHost) {
    const Cell& cell = cells_.cell(node, kHost);
    for (const std::int32_t id : IdSpan{cell.ids.data(), cell.ids.size()})
      in_storage_[static_cast<std::size_t>(id)] = false;
  }
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
    const Cell& cell = cells_.cell(node, tier);
    if (cell.absent()) continue;
    note_left(tier, kStorage, {cell.ids.data(), cell.ids.size()});
    return;
  }
}

void Journal::note_left(std::uint32_t tier, std::uint32_t medium, IdSpan ids) noexcept {
  if (!has_room(ids.size(), 0)) return;
  std::vector<Moved>& moves = noted_.moves;
  if (moves.empty() || moves.back().stored || moves.back().medium != medium)
    moves.push_back({false, medium, 0, 0, 0, 0, noted_.hashes.size(), 0});
  for (const std::int32_t id : ids)
    noted_.hashes.push_back(hash(tier, id));
  moves.back().pages += ids.size();
}

void Journal::require_place(std::uint32_t tier, IdSpan ids) const {
  if (ids.empty()) return;
  const std::int32_t most = *std::max_element(ids.begin(), ids.end());
  const std::size_t places = hashes_[tier].size();
  if (most >= 0 && static_cast<std::size_t>(most) >= places)
    throw BadValue{"page id", std::to_string(most), "below " + std::to_string(places)};
}

// Forgets everything if there is no room: what follows would be of no use without it.
bool Journal::has_room(std::size_t pages, std::size_t bytes) noexcept {
  const std::size_t noted = noted_.hashes.size();
  if (!lost_ && noted + pages <= noted_.hashes.capacity() && noted_.moves.size() < noted_.moves.capacity() &&
      noted_.bytes.size() + bytes <= noted_.bytes.capacity())
    return true;
  dropped_ += noted + pages;
  noted_.clear();
  in_storage_.assign(in_storage_.size(), false);
  lost_ = true;
  return false;
}

// The hash of a node's last page, from any tier that has it; of a root, that of the namespace.
std::uint64_t Journal::hash_of_end(Index node) const {
  const Node& n = nodes_[node];
  if (n.root()) return SipHash::of(of_spaces_, 0, n.key.data(), n.key.size());
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
    const Cell& cell = cells_.cell(node, tier);
    if (!cell.absent()) return hash(tier, cell.ids[n.pages - 1]);
  }
  std::uint64_t hash = hash_of_end(n.parent);
  for (std::uint32_t page = 0; page < n.pages; ++page)
    hash = SipHash::of(of_pages_, hash, n.key.data() + std::size_t{page} * nodes_.page_bytes, nodes_.page_bytes);
  return hash;
}

// The pages of a node from one on, of which a tier has the ids.
void Journal::note_stored(MovedPages* to, Index node, std::uint32_t tier, std::uint32_t medium,
                          std::uint32_t from) const {
  const Node& n = nodes_[node];
  const Cell& cell = cells_.cell(node, tier);
  const Structure::Key& space = nodes_[nodes_.root_of(node)].key;
  const std::uint64_t before = from ? hash(tier, cell.ids[from - 1]) : hash_of_end(n.parent);
  to->moves.push_back({true, medium, n.start + from, before, to->bytes.size(), to->bytes.size() + space.size(),
                       to->hashes.size(), n.pages - from});
  to->bytes.insert(to->bytes.end(), space.data(), space.data() + space.size());
  to->bytes.insert(to->bytes.end(), n.key.data() + std::size_t{from} * nodes_.page_bytes, n.key.data() + n.key.size());
  for (std::uint32_t page = from; page < n.pages; ++page)
    to->hashes.push_back(hash(tier, cell.ids[page]));
}

// ---------------------------------------------------------------- what listeners take

// An operation may fill the cells of a path from its end up. Arrivals without a departure in between may change places.
const MovedPages& Journal::noted() noexcept {
  const auto came = [](const Moved& move) { return move.stored; };
  const auto end = noted_.moves.end();
  for (auto at = noted_.moves.begin(); at != end;) {
    const auto from = std::find_if(at, end, came);
    at = std::find_if_not(from, end, came);
    std::sort(from, at, [](const Moved& a, const Moved& b) { return a.start < b.start; });
  }
  return noted_;
}

void Journal::clear() noexcept {
  noted_.clear();
  lost_ = false;
}

MovedPages Journal::listed() const {
  MovedPages found;
  for (Index root = 1; root < nodes_.nodes().size(); ++root)
    if (nodes_[root].live && nodes_[root].root())
      nodes_.every_from(root, [&](Index node) {
        for (std::uint32_t tier = 0; node != root && tier < cells_.tiers; ++tier)
          if (cells_.cell(node, tier).present()) note_stored(&found, node, tier, tier, 0);
        return true;
      });
  return found;
}

}  // namespace mainstem
