#include "tree/ghosts.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>
#include <unordered_set>

namespace mainstem {

namespace {

constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
constexpr std::uint32_t kTogether = 16;   // pages that may share an entry of the filter
constexpr std::uint32_t kVersions = 256;  // of a page that are looked at, the newest first
constexpr std::size_t kForgotten = 8;     // the filter has so many times the pages that are remembered, twice
constexpr std::size_t kFewest = 1024;     // pages of a filter
constexpr std::size_t kBits = 48;         // for a page

// Pages [page, end) of a namespace, by their first; end 0: the page alone.
std::uint64_t mark(std::uint64_t space, std::uint64_t hash, std::uint32_t page, std::uint32_t end) {
  return fold(hash ^ space, kOdd ^ (std::uint64_t{page} << 32 | end));
}
std::uint32_t short_hash(std::uint64_t of) {
  return static_cast<std::uint32_t>(of * kOdd >> 32);
}

}  // namespace

// The pages that were here at some time: a Bloom filter (Bloom 1970) whose entries set three bits in each of two words
// that lie together (Putze et al. 2009). It has two generations: when the younger is full, the older is emptied, and
// its entries are lost.
class Ghosts::Filter {
 public:
  explicit Filter(std::size_t pages) : most_(std::max(kFewest, pages * kForgotten)) {
    for (Generation& each : generations_)
      each.blocks.resize((most_ * kBits + 127) / 128);
  }

  bool has(std::uint64_t mark) const {
    return std::any_of(generations_, generations_ + 2, [&](const Generation& each) {
      const Block& block = each.blocks[place(mark)];
      return (~block.low & bits(mark)) == 0 && (~block.high & bits(mark >> 18)) == 0;
    });
  }
  // Makes room for pages that went at a tick. Returns the latest tick of those that are lost for it; 0: none.
  std::uint64_t expect(std::uint32_t pages, std::uint64_t gone) noexcept {
    std::uint64_t lost = 0;
    if (generations_[0].pages + pages > most_) [[unlikely]] {
      std::swap(generations_[0], generations_[1]);
      lost = generations_[0].latest;
      std::fill(generations_[0].blocks.begin(), generations_[0].blocks.end(), Block());
      generations_[0].pages = generations_[0].latest = 0;
    }
    generations_[0].pages += pages;
    generations_[0].latest = std::max(generations_[0].latest, gone);
    return lost;
  }
  void add(std::uint64_t mark) noexcept {
    Block& block = generations_[0].blocks[place(mark)];
    block.low |= bits(mark);
    block.high |= bits(mark >> 18);
  }
  std::size_t bytes() const { return 2 * generations_[0].blocks.size() * sizeof(Block); }

 private:
  struct Block {
    std::uint64_t low = 0, high = 0;
  };
  struct Generation {
    std::vector<Block> blocks;
    std::uint64_t pages = 0, latest = 0;
  };

  std::size_t place(std::uint64_t mark) const {
    return static_cast<std::size_t>(static_cast<unsigned __int128>(mark) * generations_[0].blocks.size() >> 64);
  }
  static std::uint64_t bits(std::uint64_t of) {
    constexpr std::uint64_t kOne = 1;
    return kOne << of % 64 | kOne << (of >> 6) % 64 | kOne << (of >> 12) % 64;
  }

  const std::size_t most_;
  Generation generations_[2];
};

Ghosts::Ghosts(const Structure& nodes, std::uint64_t seed, std::size_t pages)
    : nodes_(nodes),
      seed_(fold(seed ^ kOdd, kOdd)),
      most_(pages),
      ring_(pages),
      place_bytes_(std::max<std::size_t>(nodes.page_bytes, sizeof(std::uint64_t))),
      filter_(std::make_unique<Filter>(pages)) {
  require(pages >= 1 && pages <= (1u << 30), "pages", pages, "1 to 2**30");
  symbols_.resize(pages * place_bytes_);
  firsts_.reserve(pages);
  ends_.reserve(pages);
}

Ghosts::~Ghosts() = default;

std::size_t Ghosts::bytes() const {
  return ring_.size() * sizeof(Ghost) + symbols_.size() + firsts_.bytes() + ends_.bytes() + places_.bytes() +
         filter_->bytes();
}

// ---------------------------------------------------------------- what the tree tells

void Ghosts::trimmed(Index node, std::uint32_t pages, std::uint64_t tick) noexcept {
  if (nodes_[node].removed) return;
  leave(node, pages, nodes_.next_identity(node), tick);
  places_[node].begins = true;
}

void Ghosts::reaped(Index node, std::uint64_t tick) noexcept {
  const Node& n = nodes_[node];
  if (!n.root() && !n.removed) {
    leave(node, n.pages, nodes_.identity(n.parent), tick);
    places_[n.parent].begins = true;
  }
  places_[node] = {};
}

// The last pages of a node leave it. Of more pages than are remembered, the last ones are forgotten at once.
void Ghosts::leave(Index node, std::uint32_t pages, Handle parent, std::uint64_t tick, bool hashed) noexcept {
  const Node& n = nodes_[node];
  const std::uint8_t* const symbols = n.key.data() + std::size_t{n.pages - pages} * nodes_.page_bytes;
  const auto kept = static_cast<std::uint32_t>(std::min<std::size_t>(pages, most_));
  Ghost& ghost = add(nodes_.identity(node), parent, n.end() - pages, kept);
  ghost.space = space_of(node);
  ghost.departure = {why_, tier_, n.hits, n.accessed, tick};
  ghost.hashed = hashed;
  keep(ghost, symbols);
  if (kept < pages) [[unlikely]]
    forget(ghost, kept, pages, 1, [&](std::size_t page) { return hash(symbols + page * nodes_.page_bytes); });
  why_ = Why::unknown;  // nodes above that hold nothing go for another reason
}

void Ghosts::note_join(Index upper, Index lower) noexcept {
  add(nodes_.identity(upper), nodes_.identity(lower), nodes_[upper].end(), 0).departure = {};
  places_[lower].begins = true;
}

void Ghosts::removed(const std::vector<Index>& tops, Why why, std::uint64_t tick) noexcept {
  try {
    for (hashed_ = std::max(hashed_, first_); hashed_ < next_; ++hashed_)
      if (Ghost& ghost = at(hashed_); !ghost.hashed) {
        for (std::uint32_t page = 0; page < ghost.pages; ++page)
          keep_hash(around(ghost.begin + page), symbols(ghost, page));
        ghost.hashed = true;
      }
    for (left_ = std::min(left_, most_ - pages_); left_ > 0; --left_) {
      std::uint8_t* const place = &symbols_[around(next_place_ + most_ - pages_ - left_) * place_bytes_];
      std::fill_n(place, place_bytes_, std::uint8_t{0});
    }
    std::vector<Index> going;
    for (const Index top : tops)
      nodes_.every_from(top, [&](Index node) {
        if (!nodes_[node].removed) going.push_back(node);
        return true;
      });
    for (; !going.empty(); going.pop_back()) {  // what is below is forgotten first
      const Node& n = nodes_[going.back()];
      expect(why, 0);
      leave(going.back(), n.pages, nodes_.identity(n.parent), tick, true);
      places_[n.parent].begins = true;
    }
  } catch (const std::bad_alloc&) {
    while (first_ < next_)
      push_out();
    horizon_ = tick;
  }
}

void Ghosts::removed_space(std::string_view ns) noexcept {
  const std::uint64_t space = space_of(ns);
  for (std::uint64_t number = first_; number < next_; ++number) {
    Departure& departure = at(number).departure;
    if (at(number).space == space && departure.why != Why::unknown)
      departure = {Why::removed, 0, 0, departure.accessed, departure.gone};
  }
}

void Ghosts::removed_page(std::string_view ns, Bytes key, const Walk& path) {
  const std::uint32_t last = nodes_.whole_pages(key) - 1;
  const std::vector<Known> known = find(ns, key, path, last);
  if (known.size() <= last || known[last].kind != Known::departed) return;
  const Departure gone = known[last].departure;
  const Ghost& from = at(known[last].number);
  Ghost& ghost = add(0, from.start == last ? from.parent : from.self, last, 1);
  ghost.space = space_of(ns);
  ghost.departure = {Why::removed, 0, 0, gone.accessed, gone.gone};
  ghost.hashed = true;
  keep(ghost, key.data() + std::size_t{last} * nodes_.page_bytes);
}

// ---------------------------------------------------------------- the ring

// Makes room for a ghost, and begins it.
Ghosts::Ghost& Ghosts::add(Handle self, Handle parent, std::uint32_t start, std::uint32_t pages) noexcept {
  while (first_ < next_ && (next_ - first_ == ring_.size() || pages_ + pages > most_))
    push_out();
  Ghost& ghost = at(next_);
  ghost.number = next_++;
  ghost.self = self;
  ghost.parent = parent;
  ghost.begin = next_place_;
  ghost.start = start;
  ghost.pages = pages;
  pages_ += pages;
  next_place_ = around(next_place_ + pages);
  return ghost;
}

// Keeps the symbols of a ghost, or their hashes.
void Ghosts::keep(const Ghost& ghost, const std::uint8_t* symbols) noexcept {
  if (!ghost.hashed && place_bytes_ == nodes_.page_bytes) [[likely]] {
    const std::size_t before_end = std::min<std::size_t>(ghost.pages, most_ - ghost.begin);
    std::memcpy(&symbols_[ghost.begin * place_bytes_], symbols, before_end * place_bytes_);
    std::memcpy(symbols_.data(), symbols + before_end * place_bytes_, (ghost.pages - before_end) * place_bytes_);
    return;
  }
  for (std::uint32_t page = 0; page < ghost.pages; ++page, symbols += nodes_.page_bytes) {
    const std::size_t place = around(ghost.begin + page);
    if (ghost.hashed)
      keep_hash(place, symbols);
    else
      std::memcpy(&symbols_[place * place_bytes_], symbols, nodes_.page_bytes);
  }
}

// Nothing else of the page stays, wherever its symbols are.
void Ghosts::keep_hash(std::size_t place, const std::uint8_t* page) noexcept {
  const std::uint64_t kept = hash(page);
  std::uint8_t* const to = &symbols_[place * place_bytes_];
  std::fill_n(to, place_bytes_, std::uint8_t{0});
  std::memcpy(to, &kept, sizeof(kept));
}

void Ghosts::push_out() noexcept {
  Ghost& oldest = at(first_);
  forget(oldest, 0, oldest.pages, first_ < indexed_ ? 1 : kTogether,
         [&](std::uint32_t at) { return hash(oldest, at); });
  if (first_ < indexed_) {
    if (oldest.self) ends_.erase(short_hash(oldest.self), slot(first_));
    if (oldest.pages && newest(oldest.first) == first_) firsts_.erase(short_hash(oldest.first), slot(first_));
  }
  pages_ -= oldest.pages;
  left_ += oldest.pages;
  ++first_;
}

// Pages [begin, end) of a ghost go to the filter, so many together: where nobody asks, there is no need to tell each
// from others that begin alike. `hash`: of the symbols of one of them.
template <class Hash>
void Ghosts::forget(const Ghost& ghost, std::uint32_t begin, std::uint32_t end, std::uint32_t together,
                    Hash hash) noexcept {
  horizon_ = std::max(horizon_, filter_->expect(end - begin, ghost.departure.gone));
  for (std::uint32_t at = begin, next; at < end; at = next) {
    next = std::min(end, ((ghost.start + at) / together + 1) * together - ghost.start);
    filter_->add(mark(ghost.space, hash(at), ghost.start + at, ghost.start + next));
  }
  if (ghost.departure.why != Why::removed) latest_forgotten_ = std::max(latest_forgotten_, ghost.departure.accessed);
}

std::uint64_t Ghosts::space_of(std::string_view ns) const {
  return page_name(seed_, kNone, reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size()) | 1;
}
std::uint64_t Ghosts::space_of(Index node) noexcept {
  Index known = node;
  while (!places_[known].space && !nodes_[known].root())
    known = nodes_[known].parent;
  if (!places_[known].space) places_[known].space = space_of(text(nodes_[known].key));
  const std::uint64_t space = places_[known].space;
  for (; node != known; node = nodes_[node].parent)
    places_[node].space = space;
  return space;
}

// ---------------------------------------------------------------- the index

void Ghosts::index() noexcept {
  for (indexed_ = std::max(indexed_, first_); indexed_ < next_; ++indexed_) {
    Ghost& ghost = at(indexed_);
    if (ghost.self) ends_.insert(short_hash(ghost.self), slot(indexed_));
    if (ghost.pages == 0) continue;
    ghost.first = mark(ghost.space, hash(ghost, 0), ghost.start, 0);
    ghost.older = newest(ghost.first);
    if (ghost.older)
      firsts_.replace(short_hash(ghost.first), slot(ghost.older), slot(indexed_));
    else
      firsts_.insert(short_hash(ghost.first), slot(indexed_));
  }
}

// The newest ghost with a first page; 0: there is none.
std::uint64_t Ghosts::newest(std::uint64_t first) const {
  const Index slot = firsts_.find(short_hash(first), [&](Index at) { return ring_[at - 1].first == first; });
  return slot ? ring_[slot - 1].number : 0;
}

// Returns the ghost or node at page `page` - 1 of the path to an end.
Ghosts::Holder Ghosts::holder(Handle end, std::uint32_t page) const {
  for (;;) {
    const Index slot = ends_.find(short_hash(end), [&](Index at) { return ring_[at - 1].self == end; });
    if (slot == kNone) break;
    if (ring_[slot - 1].start < page) return {slot, kNone};
    end = ring_[slot - 1].parent;
  }
  Index node = nodes_.find(end);
  while (node != kNone && nodes_[node].start >= page)
    node = nodes_[node].parent;
  return {kNone, node != kNone && nodes_[node].removed ? kNone : node};
}

// ---------------------------------------------------------------- answers

// Whether the first `page` pages of a key lead to an end. Ghosts that begin above were judged before.
Ghosts::Leads Ghosts::leads_to(Handle end, std::uint32_t page, const Walk& path) const {
  if (page == 0) return Leads::yes;
  const Holder last = holder(end, page);
  if (last.slot != kNone) {
    const Ghost& ghost = ring_[last.slot - 1];
    return ghost.query == query_ && page <= ghost.start + ghost.agree ? ghost.above : Leads::no;
  }
  if (last.node == kNone) return Leads::unknown;
  const auto here = [&](const Step& step) {
    return step.node == last.node && page <= nodes_[step.node].start + step.pages;
  };
  return std::any_of(path.rbegin(), path.rend(), here) ? Leads::yes : Leads::no;
}

// Finds how many pages of a ghost a key has, and whether it has what is above.
void Ghosts::judge(Ghost& ghost, Bytes key, const std::vector<std::uint64_t>& hashes, const Walk& path) const {
  ghost.query = query_;
  ghost.above = leads_to(ghost.parent, ghost.start, path);
  ghost.agree = 0;
  const auto same = [&](std::uint32_t page, std::size_t in_key) {
    if (ghost.hashed) return hash(ghost, page) == hashes[in_key];
    const std::size_t bytes = nodes_.page_bytes;
    return std::memcmp(symbols(ghost, page), key.data() + in_key * bytes, bytes) == 0;
  };
  if (ghost.above != Leads::no)
    while (ghost.agree < ghost.pages && ghost.start + ghost.agree < hashes.size() &&
           same(ghost.agree, ghost.start + ghost.agree))
      ++ghost.agree;
}

std::vector<Ghosts::Known> Ghosts::find(std::string_view ns, Bytes key, const Walk& path, std::uint32_t from) {
  index();
  ++query_;
  const std::uint64_t space = space_of(ns);
  std::vector<std::uint64_t> hashes(nodes_.whole_pages(key));
  std::vector<Known> found(hashes.size());
  for (std::size_t page = 0; page < hashes.size(); ++page)
    hashes[page] = hash(key.data() + page * nodes_.page_bytes);
  std::uint32_t clear = static_cast<std::uint32_t>(hashes.size());
  std::uint64_t passed_over = 0;  // of pages from `clear` on, no newer ghost was left out
  for (std::uint32_t start = 0; start < hashes.size(); ++start) {
    std::uint32_t versions = 0;
    for (std::uint64_t number = newest(mark(space, hashes[start], start, 0)); number >= first_;) {
      if (++versions > kVersions) {
        clear = std::min(clear, start);
        passed_over = std::max(passed_over, number);
        break;
      }
      Ghost& ghost = at(number);
      judge(ghost, key, hashes, path);
      const bool sure = ghost.above == Leads::yes && ghost.departure.why != Why::unknown;
      const Known known{sure ? Known::departed : Known::may_have_been, number, ghost.departure};
      for (std::uint32_t page = ghost.start; page < ghost.start + ghost.agree; ++page)
        if (number > found[page].number) found[page] = known;
      number = ghost.older;
    }
  }
  for (std::uint32_t page = from; page < found.size(); ++page) {
    const bool unclear = page >= clear && found[page].number <= passed_over;
    if (unclear || (found[page].kind == Known::never && may_have_been(space, hashes, page)))
      found[page] = {Known::may_have_been};
    if (found[page].kind == Known::never) found.resize(page);
  }
  return found;
}

bool Ghosts::may_have_been(std::uint64_t space, const std::vector<std::uint64_t>& hashes, std::uint32_t page) const {
  const std::uint32_t first = page / kTogether * kTogether;
  for (std::uint32_t begin = first; begin <= page; ++begin)
    for (std::uint32_t end = page + 1; end <= first + kTogether; ++end)
      if (filter_->has(mark(space, hashes[begin], begin, end))) return true;
  return false;
}

// Pages are distinguished by their names: hashes of everything up to their end.
std::vector<Ghosts::Page> Ghosts::evicted() {
  index();
  const auto after = [&](std::uint64_t name, std::uint64_t page) { return fold(name ^ seed_, page ^ kOdd); };
  const auto page_of = [&](const Node& n, std::size_t page) { return hash(n.key.data() + page * nodes_.page_bytes); };
  std::unordered_set<std::uint64_t> seen;
  std::vector<std::uint64_t> ends(nodes_.nodes().size());  // names of the last pages of nodes
  for (Index root = 1; root < ends.size(); ++root)
    if (nodes_[root].live && nodes_[root].root())
      nodes_.every_from(root, [&](Index node) {
        const Node& n = nodes_[node];
        std::uint64_t name = n.root() ? space_of(root) : ends[n.parent];
        for (std::uint32_t page = 0; page < n.pages; ++page)
          seen.insert(name = after(name, page_of(n, page)));
        ends[node] = name;
        return true;
      });
  std::vector<std::uint64_t> begins(ring_.size());  // names before the first pages of ghosts; 0: not known
  const auto name_before = [&](const Ghost& ghost) {
    if (ghost.start == 0) return ghost.space;
    const Holder last = holder(ghost.parent, ghost.start);
    if (last.slot == kNone && last.node == kNone) return std::uint64_t{0};
    const bool gone = last.slot != kNone;
    std::uint64_t name = gone ? begins[last.slot - 1] : ends[nodes_[last.node].parent];
    const std::uint32_t start = gone ? ring_[last.slot - 1].start : nodes_[last.node].start;
    for (std::uint32_t page = 0; name && page < ghost.start - start; ++page)
      name = after(name, gone ? hash(ring_[last.slot - 1], page) : page_of(nodes_[last.node], page));
    return name;
  };
  for (std::uint64_t number = next_; number-- > first_;)  // what lies above one is newer
    begins[slot(number) - 1] = name_before(at(number));
  std::vector<Page> found;
  for (std::uint64_t number = next_; number-- > first_;) {
    const Ghost& ghost = at(number);
    const Departure& departure = ghost.departure;
    std::uint64_t name = name_before(ghost);  // but not above a page that was removed
    if (!name || departure.why == Why::unknown) latest_forgotten_ = std::max(latest_forgotten_, departure.accessed);
    for (std::uint32_t page = 0; name && page < ghost.pages; ++page)
      if (seen.insert(name = after(name, hash(ghost, page))).second && departure.why < Why::removed)
        found.push_back({ghost.start + page, departure.accessed});
  }
  return found;
}

}  // namespace mainstem
