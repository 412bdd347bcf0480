#include "tree/ghosts.h"

#include <algorithm>
#include <cassert>
#include <new>

namespace mainstem {

namespace {

constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
constexpr std::size_t kMostPending = 1 << 16;  // evictions
constexpr std::size_t kForgotten = 8;          // the filter has so many times the pages that are remembered, twice
constexpr std::size_t kFewest = 1024;          // pages of a filter
constexpr std::size_t kBits = 12;              // for a page: three in a thousand names are found in vain
constexpr std::uint32_t kProbes = 8;

}  // namespace

// What was here at some time, or may have been (Bloom 1970). In two generations: when the younger is full, the older is
// emptied, and what it had is lost.
class Ghosts::Filter {
 public:
  explicit Filter(std::size_t pages) : most_(std::max(kFewest, pages * kForgotten)) {
    for (Generation& each : generations_)
      each.words.resize((most_ * kBits + 63) / 64);
  }

  bool has(std::uint64_t name) const { return has(generations_[0], name) || has(generations_[1], name); }
  // Returns the latest departure that was lost to make room; 0: none was.
  std::uint64_t add(std::uint64_t name, std::uint64_t gone) noexcept {
    std::uint64_t lost = 0;
    if (generations_[0].count == most_) {
      std::swap(generations_[0], generations_[1]);
      lost = generations_[0].latest;
      std::fill(generations_[0].words.begin(), generations_[0].words.end(), 0);
      generations_[0].count = generations_[0].latest = 0;
    }
    Generation& young = generations_[0];
    each_bit(name, [&](std::size_t bit) {
      young.words[bit / 64] |= std::uint64_t{1} << bit % 64;
      return true;
    });
    ++young.count;
    young.latest = std::max(young.latest, gone);
    return lost;
  }
  std::size_t bytes() const { return 2 * generations_[0].words.size() * sizeof(std::uint64_t); }

 private:
  struct Generation {
    std::vector<std::uint64_t> words;
    std::size_t count = 0;
    std::uint64_t latest = 0;
  };

  template <class Each>
  bool each_bit(std::uint64_t name, Each each) const {
    const std::uint64_t bits = most_ * kBits;
    std::uint64_t at = name;
    const std::uint64_t step = (name >> 32 ^ name << 32) * kOdd | 1;
    for (std::uint32_t probe = 0; probe < kProbes; ++probe, at += step)
      if (!each(static_cast<std::size_t>(static_cast<unsigned __int128>(at) * bits >> 64))) return false;
    return true;
  }
  bool has(const Generation& in, std::uint64_t name) const {
    return each_bit(name, [&](std::size_t bit) { return in.words[bit / 64] >> bit % 64 & 1; });
  }

  const std::size_t most_;
  Generation generations_[2];
};

Ghosts::Ghosts(const Structure& nodes, std::uint64_t seed, std::size_t pages)
    : nodes_(nodes),
      seed_(fold(seed ^ kOdd, kOdd)),
      seed2_(fold(seed_ ^ kOdd, seed | 1)),
      most_(pages),
      symbols_(std::make_unique_for_overwrite<std::uint8_t[]>(pages * nodes.page_bytes)),
      ring_(pages),
      departures_(pages + 1),
      filter_(std::make_unique<Filter>(pages)) {
  require(pages >= 1 && pages <= (1u << 30), "pages", pages, "1 to 2**30");
  pending_.reserve(std::min(pages, kMostPending));
  joins_.reserve(pending_.capacity());
  gone_roots_.reserve(pending_.capacity());
  table_.reserve(pages);
}

Ghosts::~Ghosts() = default;

std::size_t Ghosts::bytes() const {
  return most_ * nodes_.page_bytes + ring_.size() * sizeof(Page) + departures_.size() * sizeof(Departure) +
         pending_.capacity() * sizeof(Pending) + (joins_.capacity() + gone_roots_.capacity()) * 2 * sizeof(Handle) +
         table_.bytes() + marks_.bytes() + filter_->bytes();
}

// ---------------------------------------------------------------- names

std::uint64_t Ghosts::name_of(std::string_view ns) const {
  std::uint64_t name = seed_ ^ ns.size();
  const auto* at = reinterpret_cast<const std::uint8_t*>(ns.data());
  for (std::size_t left = ns.size(); left > 0;) {
    const std::size_t now = std::min<std::size_t>(left, 8);
    name = fold(name ^ load_word(at, now), seed2_ ^ name >> 32 ^ now);
    at += now;
    left -= now;
  }
  return fold(name ^ seed_, kOdd ^ seed2_);
}

std::uint64_t Ghosts::name_after(std::uint64_t before, const std::uint8_t* page) const {
  std::uint64_t name = before ^ seed_;
  std::size_t left = nodes_.page_bytes;
  for (; left >= 16; left -= 16, page += 16)
    name = fold(load_word(page) ^ name, load_word(page + 8) ^ seed2_ ^ name >> 32);
  for (; left > 0; left -= std::min<std::size_t>(left, 8), page += 8)
    name = fold(load_word(page, std::min<std::size_t>(left, 8)) ^ name, seed2_ ^ name >> 32 ^ kOdd);
  return fold(name ^ kOdd, seed_ ^ before);
}

// ---------------------------------------------------------------- what the tree tells

bool Ghosts::room_for(std::uint32_t pages) noexcept {
  const auto has = [&] {
    return pending_.size() < pending_.capacity() &&
           used_ + std::size_t{pages} * nodes_.page_bytes <= most_ * nodes_.page_bytes;
  };
  if (!has()) settle();
  return has();
}

// Returns whether it is pending now; a departure of more pages than are remembered is settled at once.
bool Ghosts::note(Index node, std::uint32_t pages, Handle parent, std::uint64_t tick) noexcept {
  const Node& n = nodes_[node];
  Departure departure{why_, tier_, n.hits, n.accessed, tick, 0};
  why_ = Why::unknown;  // nodes above that hold nothing go for another reason
  const std::size_t bytes = std::size_t{pages} * nodes_.page_bytes;
  const std::uint32_t start = n.end() - pages;
  const std::uint8_t* const symbols = n.key.data() + n.key.size() - bytes;
  if (room_for(pages)) [[likely]] {
    std::memcpy(symbols_.get() + used_, symbols, bytes);
    pending_.push_back({nodes_.identity(node), parent, used_, start, pages, departure});
    used_ += bytes;
    return true;
  }
  std::uint64_t name = 0;
  try {
    name_at(nodes_.identity(node), start, &name, &departure.space);
    depart(departure, name, start, {symbols, bytes});
  } catch (const std::bad_alloc&) {
    horizon_ = tick;
  }
  names_.clear();
  return false;
}

void Ghosts::reaped(Index node, std::uint64_t tick) noexcept {
  const Node& n = nodes_[node];
  if (n.root()) {
    if (!std::exchange(marks_[node], 0)) return;
    if (gone_roots_.size() == gone_roots_.capacity()) return settle();
    gone_roots_.emplace_back(nodes_.identity(node), name_of(text(n.key)));
    return;
  }
  if (!n.removed) {
    note(node, n.pages, nodes_.identity(n.parent), tick);
    mark(n.parent);
  }
  marks_[node] = 0;
}

void Ghosts::note_join(Index upper, Index lower) noexcept {
  if (joins_.size() == joins_.capacity()) return settle();
  joins_.emplace_back(nodes_.identity(upper), nodes_.identity(lower));
  marks_[upper] = 0;
  mark(lower);
}

void Ghosts::removed(const std::vector<Index>& tops, Why why, std::uint64_t tick) noexcept {
  settle();
  try {
    for (const Index top : tops) {
      std::uint64_t name = 0, space = 0;
      nodes_.every_from(top, [&](Index node) {
        const Node& n = nodes_[node];
        if (!n.removed && name_at(nodes_.identity(n.parent), n.start, &name, &space)) {
          const Departure departure{why, 0, 0, n.accessed, tick, space};
          depart(departure, name, n.start, {n.key.data(), n.key.size()});
        }
        return true;
      });
    }
  } catch (const std::bad_alloc&) {
    horizon_ = tick;
  }
  names_.clear();
}

void Ghosts::removed_space(std::string_view ns) noexcept {
  settle();
  const std::uint64_t space = name_of(ns);
  for (Departure& departure : departures_)
    if (departure.space == space) departure = {Why::removed, 0, 0, departure.accessed, departure.gone, space};
}

void Ghosts::removed_page(std::string_view ns, Bytes key) noexcept {
  settle();
  std::uint64_t name = name_of(ns);
  for (std::size_t at = 0; at < key.size(); at += nodes_.page_bytes)
    name = name_after(name, key.data() + at);
  const std::uint32_t at = place(name);
  if (at == 0) return;
  const Page page = ring_[at - 1];
  Departure departure = departures_[page.departure % departures_.size()];
  departure = {Why::removed, 0, 0, departure.accessed, departure.gone, departure.space};
  departures_[++departed_ % departures_.size()] = departure;
  remember({name, departed_, page.start});
}

// ---------------------------------------------------------------- settling

void Ghosts::settle() noexcept {
  if (pending_.empty() && joins_.empty() && gone_roots_.empty()) return;
  const std::uint64_t last = pending_.empty() ? 0 : pending_.back().departure.gone;
  try {
    settle_all();
  } catch (const std::bad_alloc&) {
    horizon_ = std::max(horizon_, last);
  }
  for (const Pending& each : pending_)
    unmark(each.parent);
  for (const auto& [from, to] : joins_)
    unmark(to);
  pending_.clear();
  joins_.clear();
  gone_roots_.clear();
  used_ = 0;
  moved_.clear();
  spaces_.clear();
  ended_.clear();
  names_.clear();
}

void Ghosts::settle_all() {
  moved_.insert(joins_.begin(), joins_.end());
  spaces_.insert(gone_roots_.begin(), gone_roots_.end());
  for (std::size_t i = 0; i < pending_.size(); ++i)
    ended_.emplace(pending_[i].self, i);
  for (const Pending& each : pending_) {
    std::uint64_t name = 0;
    Departure departure = each.departure;
    const bool known = name_at(each.parent, each.start, &name, &departure.space);
    horizon_ = std::max(horizon_, known ? 0 : departure.gone);
    if (known)
      depart(departure, name, each.start, {symbols_.get() + each.at, std::size_t{each.pages} * nodes_.page_bytes});
  }
}

// The name of the page before page `depth` of the path to an end, and that of the namespace. Returns whether there is a
// note of that end; there always should be.
bool Ghosts::name_at(Handle end, std::uint32_t depth, std::uint64_t* name, std::uint64_t* space) {
  struct Piece {
    Handle end;
    const std::uint8_t* key;
    std::uint32_t from, to;
  };
  std::vector<Piece> pieces;  // from the end up
  bool known = true;
  for (;;) {
    const auto named = names_.find(end);
    if (named != names_.end() && named->second.depth == depth) {
      *name = named->second.name;
      *space = named->second.space;
      break;
    }
    if (const Index node = nodes_.find(end)) {
      const Node& n = nodes_[node];
      if (n.root()) {
        *name = *space = name_of(text(n.key));
        break;
      }
      if (n.start < depth) {
        pieces.push_back({n.end() == depth ? end : 0, n.key.data(), n.start, depth});
        depth = n.start;
      }
      end = nodes_.identity(n.parent);
    } else if (const auto moved = moved_.find(end); moved != moved_.end()) {
      end = moved->second;
    } else if (const auto ended = ended_.find(end); ended != ended_.end()) {
      const Pending& each = pending_[ended->second];
      if (each.start < depth) {
        const bool whole = each.start + each.pages == depth;
        pieces.push_back({whole ? end : 0, symbols_.get() + each.at, each.start, depth});
        depth = each.start;
      }
      end = each.parent;
    } else {
      const auto root = spaces_.find(end);
      known = root != spaces_.end();
      *name = *space = known ? root->second : 0;
      break;
    }
  }
  while (!pieces.empty()) {
    const Piece& piece = pieces.back();
    for (std::uint32_t page = 0; page < piece.to - piece.from; ++page)
      *name = name_after(*name, piece.key + std::size_t{page} * nodes_.page_bytes);
    if (piece.end && known) names_[piece.end] = {piece.to, *name, *space};
    pieces.pop_back();
  }
  return known;
}

void Ghosts::depart(const Departure& departure, std::uint64_t before, std::uint32_t start, Bytes key) {
  path_.clear();
  for (std::size_t at = 0; at < key.size(); at += nodes_.page_bytes)
    path_.push_back(before = name_after(before, key.data() + at));
  if (departure.why != Why::unknown) departures_[++departed_ % departures_.size()] = departure;
  for (std::size_t at = path_.size(); at-- > 0;) {  // the last one is forgotten first
    if (departure.why == Why::unknown)
      forget(path_[at], departure);
    else
      remember({path_[at], departed_, start + static_cast<std::uint32_t>(at)});
  }
}

void Ghosts::remember(const Page& page) noexcept {
  erase(page.name);
  if (count_ == ring_.size()) {
    const Page& oldest = ring_[first_];
    if (place(oldest.name) == first_ + 1) {
      const std::uint64_t name = oldest.name;
      forget(name, departures_[oldest.departure % departures_.size()]);
      erase(name);
    }
    first_ = (first_ + 1) % ring_.size();
    --count_;
  }
  const std::size_t at = (first_ + count_++) % ring_.size();
  ring_[at] = page;
  table_.insert(static_cast<std::uint32_t>(page.name >> 32), static_cast<Index>(at + 1));
}

void Ghosts::forget(std::uint64_t name, const Departure& departure) noexcept {
  horizon_ = std::max(horizon_, filter_->add(name, departure.gone));
  if (departure.why != Why::removed) latest_forgotten_ = std::max(latest_forgotten_, departure.accessed);
}

void Ghosts::erase(std::uint64_t name) noexcept {
  if (const std::uint32_t at = place(name)) table_.erase(static_cast<std::uint32_t>(name >> 32), at);
}

// ---------------------------------------------------------------- answers

Ghosts::Known Ghosts::find(std::uint64_t name) const {
  if (const std::uint32_t at = place(name)) {
    const std::uint32_t number = ring_[at - 1].departure;
    return {Known::departed, number, departures_[number % departures_.size()]};
  }
  return {filter_->has(name) ? Known::may_have_been : Known::never};
}

void Ghosts::sweep(std::uint64_t tick) noexcept {
  try {
    for (Index node = 1; node < nodes_.nodes().size(); ++node) {
      const Node& n = nodes_[node];
      if (!n.live || n.root() || n.removed || n.created < swept_) continue;
      std::uint64_t name = 0, space = 0;
      if (!name_at(nodes_.identity(n.parent), n.start, &name, &space)) continue;
      for (std::uint32_t page = 0; page < n.pages; ++page)
        erase(name = name_after(name, n.key.data() + std::size_t{page} * nodes_.page_bytes));
    }
    swept_ = tick;
  } catch (const std::bad_alloc&) {  // the next one does it all
  }
  names_.clear();
}

}  // namespace mainstem
