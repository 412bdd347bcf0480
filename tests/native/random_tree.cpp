// Random operations on a tree, each compared with a slow, obvious model: a map from a whole prefix to the cells of the
// page that it ends with. The model has no nodes, splits or joins. Where a rule depends on nodes (a state in flight
// stops an insertion at the beginning of its node), the test accepts the tree's answer and only checks its reason.
#include <algorithm>
#include <limits>
#include <set>

#include "random_operations.h"
#include "worlds.h"

namespace mainstem {

namespace {

struct Shape {
  std::uint32_t symbol_bytes, page_size;
  std::vector<Component> rows;
  std::uint32_t tiers;
  std::string policy;
};

struct Place {  // a handle, and its prefix
  Handle handle;
  Path path;
};
struct Hold {
  Place place;
  std::uint32_t tier;
  bool retained = false;
};
struct Flight {
  Place place;
  std::uint32_t tier;
  std::set<std::pair<Path, std::size_t>> cells;
};

struct Refused {};

const std::vector<Component> kFull{{Kind::full}};
constexpr std::uint32_t kWindow = 5, kChunk = 6;

std::vector<Shape> shapes(Choices& choose) {
  const std::vector<std::vector<Component>> rows{
      kFull,
      kFull,
      {{Kind::full}, {Kind::window, kWindow}},
      {{Kind::full}, {Kind::state}},
      {{Kind::full}, {Kind::window, kWindow}, {Kind::state}},
      {{Kind::full}, {Kind::chunked, kChunk}},
      {{Kind::full}, {Kind::window, kWindow}, {Kind::chunked, kChunk}},
  };
  std::vector<Shape> all;
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (const Policy& policy : kPolicies)
      if (policy.rank)
        all.push_back({choose.of<std::uint32_t>({4, 4, 8, 16}), choose.of<std::uint32_t>({1, 2, 3, 8}), rows[i],
                       i == 0 ? 1 : 1 + choose.below(2), std::string(policy.name)});
  return all;
}

class TreeWorld : Paging {
 public:
  TreeWorld(const Shape& shape, std::uint64_t seed)
      : Paging{shape.symbol_bytes, shape.page_size},
        choose_(seed),
        shape_(shape),
        rows_(shape.rows),
        tiers_(shape.tiers),
        columns_(rows_.size() * tiers_),
        tree_(shape.symbol_bytes, shape.page_size, shape.rows, shape.tiers, shape.policy, seed) {
    // With shares that bind nobody everything is as without: their orders are kept beside the others.
    if (choose_.below(2)) tree_.share_out(Shares(columns_), {});
    // A memory of evictions changes nothing.
    if (choose_.below(2)) tree_.remember(choose_.of<std::size_t>({1, 3, 20, 200}));
  }

  void step() {
    if (model_.size() > 60 || holds_.size() > 6 || flights_.size() > 3) tidy();
    switch (choose_.below(18)) {
      case 0:
      case 1:
        match();
        break;
      case 2:
      case 3:
      case 4:
        insert();
        break;
      case 5:
        evict();
        break;
      case 6:
        lock();
        break;
      case 7:
        unlock();
        break;
      case 8:
        move_lock();
        break;
      case 9:
        attach();
        break;
      case 10:
        end_transfer();
        break;
      case 11:
        locate();
        break;
      case 12:
        back_up();
        break;
      case 13:
        retain();
        break;
      case 14:
        demote();
        break;
      case 15:
        advise();
        break;
      case 16:
        explain();
        break;
      default:
        refuse();
    }
    compare();
  }

  // Keeps the tree small, so that keys keep sharing prefixes.
  void tidy() {
    if (model_.size() > 60) evict();
    if (holds_.size() > 6) unlock();
    if (flights_.size() > 3) end_transfer();
    compare();
  }

  // The last operation, for the report of a failure.
  const std::string& doing() const { return doing_; }

  // Releases everything: nothing may be left.
  void finish() {
    while (!holds_.empty())
      unlock();
    while (!flights_.empty())
      end_transfer();
    for (std::uint32_t tier = 0; tier < tiers_; ++tier)
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        take(tree_.evict(1000000, c, tier), tier);
    compare();
    expect_equal(tree_.size(), 0, "nodes left");
    expect_equal(tree_.stats().namespaces, 0, "namespaces left");
  }

 private:
  std::size_t column_of(std::uint32_t component, std::uint32_t tier) const { return component * tiers_ + tier; }
  std::uint32_t pages_of(std::string_view key) const { return static_cast<std::uint32_t>(key.size() / page_bytes()); }
  PageCell cell(const Path& path, std::size_t column) const { return cell_of(model_, path, column); }
  void put(const Path& path, std::size_t column, PageCell cell) { put_cell(&model_, path, columns_, column, cell); }
  Path some_path() {
    const std::vector<std::string> spaces{"", "", "", "a", "a namespace with a longer name"};
    return {choose_.of(spaces), some_key(choose_, symbol_bytes, page_size, 6)};
  }
  Ids new_ids(std::size_t n) {
    Ids ids(n);
    for (std::int32_t& id : ids)
      id = next_id_++;
    return ids;
  }
  void remember(Handle handle, const Path& path) {
    expect((handle == 0) == path.second.empty(), "a handle is 0 for the root only");
    if (handle) places_.push_back({handle, path});
    if (places_.size() > 8) places_.erase(places_.begin());
  }

  template <class... Numbers>
  void doing(const char* what, const Path& path, Numbers... numbers) {
    doing_ = std::string(what) + " \"" + path.first + "\", " + std::to_string(pages_of(path.second)) + " pages";
    ((doing_ += ", " + std::to_string(numbers)), ...);
  }

  // ---------------------------------------------------------------- explanations

  bool present(const Path& path) const {
    for (std::uint32_t tier = 0; tier < tiers_; ++tier)
      if (cell(path, column_of(0, tier)).presence == Presence::present) return true;
    return false;
  }

  // Whether a page of a path is in flight.
  bool flies(const Path& path) const {
    for (std::uint32_t page = 1; page <= pages_of(path.second); ++page)
      for (std::uint32_t tier = 0; tier < tiers_; ++tier)
        if (cell(front(path, page), column_of(0, tier)).presence == Presence::in_flight) return true;
    return false;
  }

  // No cause may be wrong. The simulator, which has a log, checks why a page was evicted.
  void explain() {
    const Path path = some_path();
    doing("explain", path);
    const PeekResult peeked = tree_.peek(path.first, bytes_of(path.second), false);
    const Explanation found = tree_.explain(path.first, bytes_of(path.second), choose_.one_in(2));
    std::uint32_t at = 0, here = 0;
    for (const Explained& run : found.runs) {
      expect_equal(run.begin, at, "the first page of a run");
      expect(run.begin < run.end, "a run has a page");
      at = run.end;
      if (run.cause == Cause::device || run.cause == Cause::host) here += run.end - run.begin;
      for (std::uint32_t page = run.begin; page < run.end; ++page) {
        const Path upto = front(path, page + 1);
        const bool seen = ever_.contains(upto);
        if (run.cause == Cause::never_seen || run.cause == Cause::parted)
          expect(!seen || found.horizon, "a page that was never seen");
        if (run.cause == Cause::departed) expect(seen && !present(upto), "a page that was evicted");
        if (run.cause == Cause::forgotten) expect(!present(upto), "a page that was forgotten is not here");
        if (run.cause == Cause::state_missing || run.cause == Cause::window_missing)
          expect(rows_.size() > 1 && present(upto), "a page that lacks another component");
        if (run.cause == Cause::in_flight) expect(flies(upto), "a page in flight, or after one");
      }
    }
    expect_equal(at, pages_of(path.second), "pages explained");
    expect_equal(here, peeked.pages + peeked.host_pages, "pages found");
  }
  void note_seen() {
    for (const auto& [path, cells] : model_)
      if (present(path)) ever_.insert(path);
  }

  // ---------------------------------------------------------------- invariants

  // Whether the first `pages` pages of a path are usable, if every tier from `first_tier` to `tier` counts.
  bool allowed(const Path& path, std::uint32_t pages, std::uint32_t tier, std::size_t rows,
               std::uint32_t first_tier = 0) const {
    const auto usable = [&](std::uint32_t c, std::uint32_t end) {
      for (std::uint32_t t = first_tier; t <= tier; ++t)
        if (cell(front(path, end), column_of(c, t)).presence == Presence::present) return true;
      return false;
    };
    for (std::uint32_t c = 0; c < rows; ++c) {
      if (rows_[c].kind == Kind::state && !usable(c, pages)) return false;
      const std::uint32_t end = pages * page_size;
      std::uint32_t first = rows_[c].kind == Kind::full ? 0 : pages;
      if (rows_[c].kind == Kind::window) first = (end - std::min(kWindow, end)) / page_size;
      if (rows_[c].kind == Kind::chunked) first = end / kChunk * kChunk / page_size;
      for (std::uint32_t page = first; page < pages; ++page)
        if (!usable(c, page + 1)) return false;
    }
    return true;
  }
  std::uint32_t longest(const Path& path, std::uint32_t tier, std::size_t rows) const {
    std::uint32_t pages = pages_of(path.second);
    while (pages > 0 && !allowed(path, pages, tier, rows))
      --pages;
    return pages;
  }
  // Symbols of the page after the match that some page of the tree agrees with.
  std::uint32_t agreement_after(const Path& path, std::uint32_t pages) const {
    if (rows_.size() > 1) return 0;
    const std::string_view tail = std::string_view(path.second).substr(pages * page_bytes());
    return static_cast<std::uint32_t>(agreement(*this, model_, front(path, pages), tail));
  }
  bool exists(const Path& path) const {
    const auto at = model_.lower_bound(path);
    if (at != model_.end() && begins_with(at->first, path)) return true;
    return std::any_of(holds_.begin(), holds_.end(), [&](const Hold& h) { return begins_with(h.place.path, path); });
  }

  // Whether a lock of the prefix `lock` holds a page of a component.
  bool held_by(const Path& lock, const Path& page, std::uint32_t component) const {
    if (!begins_with(lock, page)) return false;
    const std::uint32_t end = pages_of(lock.second) * page_size;
    const std::uint32_t at = pages_of(page.second) - 1;
    if (rows_[component].kind == Kind::full) return true;
    if (rows_[component].kind == Kind::state) return (at + 1) * page_size == end;
    if (rows_[component].kind == Kind::chunked) return at >= (end - 1) / kChunk * kChunk / page_size;
    return at >= (end - std::min(kWindow, end)) / page_size;
  }
  bool is_held(const Path& page, std::uint32_t component, std::uint32_t tier) const {
    for (const Hold& hold : holds_)
      if (hold.tier == tier && held_by(hold.place.path, page, component)) return true;
    for (const Flight& flight : flights_)
      if (flight.tier == tier && held_by(flight.place.path, page, component)) return true;
    return false;
  }

  void compare() {
    tree_.check();
    note_seen();
    Uses uses;
    const Contents held = contents_of(tree_, rows_, tiers_, &uses);
    expect(held == model_, "the tree holds what the model holds" + first_difference(held));
    compare_uses(uses);
    compare_demoted();
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      for (std::uint32_t tier = 0; tier < tiers_; ++tier)
        compare_counts(c, tier);
    for (std::uint32_t tier = 0; tier < tiers_; ++tier)
      compare_hottest(tier);
    for (const Place& place : places_)
      compare_place(place);
    for (const Hold& hold : holds_)
      expect_equal(tree_.end(hold.place.handle), pages_of(hold.place.path.second), "the end of a locked node");
  }
  // Pages that are evicted and return start from zero; pages kept by a lock only keep their counts.
  void compare_uses(const Uses& uses) {
    std::erase_if(uses_, [&](const auto& use) { return !exists(use.first); });
    for (const auto& [path, use] : uses) {
      expect_equal(use.hits, uses_[path].hits, "hits of a page");
      expect_equal(use.priority, uses_[path].priority, "the priority of a page");
    }
  }
  void compare_demoted() {
    std::erase_if(demoted_, [&](const auto& page) { return !exists(page.first); });
    for (const std::string& ns : tree_.namespaces())
      for (const NodeView& view : tree_.nodes(ns)) {
        const Path path = tree_.path_key(view.stats.node);
        for (std::uint32_t page = view.stats.start; page < view.stats.start + view.stats.pages; ++page)
          expect_equal(Probe::node(tree_, view.stats.node).demoted, demoted(front(path, page + 1)),
                       "on how many tiers a page goes first");
      }
  }
  std::string first_difference(const Contents& held) const {
    for (const Contents* one : {&held, &model_})
      for (const auto& [path, cells] : *one)
        for (std::size_t column = 0; column < columns_; ++column) {
          const auto there = held.find(path);
          const PageCell has = there == held.end() ? PageCell{} : there->second[column];
          const PageCell expected = cell(path, column);
          if (has == expected) continue;
          const auto text = [](PageCell c) {
            return std::to_string(c.id) + " (" + std::to_string(static_cast<int>(c.presence)) + ")";
          };
          return ": cell " + std::to_string(column) + " of page " + std::to_string(pages_of(path.second)) + " in \"" +
                 path.first + "\" is " + text(has) + ", not " + text(expected);
        }
    return "";
  }
  void compare_counts(std::uint32_t component, std::uint32_t tier) const {
    CellCounts expected;
    for (const auto& [path, cells] : model_) {
      const Presence presence = cells[column_of(component, tier)].presence;
      expected.present += presence == Presence::present;
      expected.in_flight += presence == Presence::in_flight;
      expected.locked += presence == Presence::present && is_held(path, component, tier);
    }
    const CellCounts counts = tree_.counts(component, tier);
    expect_equal(counts.present, expected.present, "ids present");
    expect_equal(counts.in_flight, expected.in_flight, "ids in flight");
    expect_equal(counts.locked, expected.locked, "ids locked");
  }
  // A handle denotes its prefix, or is stale.
  void compare_place(const Place& place) const {
    const std::uint32_t pages = pages_of(place.path.second);
    try {
      expect_equal(tree_.end(place.handle), pages, "the end of a node");
    } catch (const StaleHandle& error) {
      expect_equal(error.handle, place.handle, "the handle that is stale");
      return;
    }
    expect(exists(place.path), "a good handle denotes something");
    compare_ids(place.handle, place.path);
    if (&place == &places_.front() || &place == &places_.back()) compare_views(place);  // slow, so not for all
  }
  // Checks the views of a node, and of the path to it.
  void compare_views(const Place& place) const {
    expect(tree_.path_key(place.handle) == place.path, "the key of a path");
    const std::uint32_t start = tree_.start(place.handle);
    expect_equal(start, view_of(place).stats.start, "the start of a node");
    const std::uint32_t end = pages_of(place.path.second);
    for (std::uint32_t tier = 0; tier < tiers_; ++tier) {
      for (std::uint32_t c = 0; c < rows_.size(); ++c) {
        const std::size_t column = column_of(c, tier);
        const PageCell last = cell(place.path, column);
        expect(tree_.presence(place.handle, c, tier) == last.presence, "the presence of a node");
        Ids ids;
        for (std::uint32_t page = rows_[c].per_page() ? start : end - 1; page < end; ++page)
          if (last.presence == Presence::present) ids.push_back(cell(front(place.path, page + 1), column).id);
        expect(tree_.own_ids(place.handle, c, tier) == ids, "the node's own ids");
      }
      expect_equal(tree_.in_flight_above(place.handle, tier), flight_above(front(place.path, start), tier),
                   "the transfer in flight above");
      for (std::uint32_t hits = 0; hits < 3; ++hits)
        compare_lacking(place, tier, hits);
    }
  }
  // The node that names the transfer of the nearest full pages in flight above.
  Handle flight_above(const Path& path, std::uint32_t tier) const {
    for (std::uint32_t pages = pages_of(path.second); pages > 0; --pages)
      for (const Flight& flight : flights_)
        if (flight.tier == tier && flight.cells.contains({front(path, pages), column_of(0, tier)}))
          return flight.place.handle;
    return 0;
  }
  // Pages where tier `to` lacks something that tier `from` has, up to a hole in the first component on both, or a page
  // with too few hits.
  std::set<Path> lacking_pages(const Path& path, std::uint32_t from, std::uint32_t to, std::uint32_t hits) const {
    std::set<Path> pages;
    for (std::uint32_t end = 1; end <= pages_of(path.second); ++end) {
      const Path here = front(path, end);
      const auto presence = [&](std::uint32_t c, std::uint32_t tier) {
        return cell(here, column_of(c, tier)).presence;
      };
      bool lacks = false;
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        lacks = lacks || (presence(c, to) == Presence::absent && presence(c, from) == Presence::present);
      if (presence(0, to) == Presence::absent && presence(0, from) != Presence::present) break;
      const auto use = uses_.find(here);
      if (lacks && (use == uses_.end() ? 0 : use->second.hits) < hits) break;
      if (lacks) pages.insert(here);
    }
    return pages;
  }
  void compare_lacking(const Place& place, std::uint32_t to, std::uint32_t hits) const {
    const std::uint32_t from = tiers_ - 1 - to;
    std::set<Path> expected = lacking_pages(place.path, from, to, hits);
    std::uint32_t reached = 0;
    for (const Handle node : tree_.lacking(place.handle, from, to, hits)) {
      const std::uint32_t start = tree_.start(node);
      expect(start >= reached, "nodes come from the top");
      reached = tree_.end(node);
      expect(tree_.path_key(node) == front(place.path, reached), "a node is on the path");
      std::size_t lacks = 0;
      for (std::uint32_t end = start + 1; end <= reached; ++end)
        lacks += expected.erase(front(place.path, end));
      expect(lacks > 0, "a node lacks something");
    }
    expect(expected.empty(), "everything lacking was named");
  }
  void compare_hottest(std::uint32_t tier) const {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> uses;  // hits and time of all present nodes
    std::map<Handle, std::pair<std::uint32_t, std::uint64_t>> by_node;
    for (const std::string& ns : tree_.namespaces())
      for (const NodeView& node : tree_.nodes(ns))
        if (node.cells[column_of(0, tier)].presence == Presence::present)
          uses.push_back(by_node[node.stats.node] = {node.stats.hits, node.stats.accessed});
    std::sort(uses.rbegin(), uses.rend());
    const std::vector<Handle> found = tree_.hottest(tier);
    expect_equal(found.size(), uses.size(), "the hottest nodes");
    expect(std::set<Handle>(found.begin(), found.end()).size() == found.size(), "each is named once");
    for (std::size_t i = 0; i < found.size(); ++i)
      expect(by_node.contains(found[i]) && by_node[found[i]] == uses[i], "the hottest come first");
  }
  void compare_ids(Handle handle, const Path& path) const {
    const std::uint32_t pages = pages_of(path.second);
    for (std::uint32_t c = 0; c < rows_.size() && handle; ++c)
      for (std::uint32_t tier = 0; tier < tiers_; ++tier) {
        const std::uint32_t begin = pages / 2;
        Ids ids(pages - begin);
        tree_.copy_ids(handle, c, tier, begin, ids.data());
        for (std::uint32_t page = begin; page < pages; ++page)
          if (rows_[c].kind != Kind::state || page + 1 == pages)  // inside, a state's place depends on the nodes
            expect_equal(ids[page - begin], cell(front(path, page + 1), column_of(c, tier)).id, "an id of a path");
      }
  }

  // ---------------------------------------------------------------- operations

  void match() {
    const Path path = some_path();
    const Bytes key = bytes_of(path.second);
    const std::uint32_t pages = longest(path, 0, rows_.size());
    const std::uint32_t all_tiers = longest(path, tiers_ - 1, rows_.size());
    const bool partial = choose_.one_in(2);
    doing("match", path, partial);
    const std::uint32_t inside = partial ? agreement_after(path, pages) : 0;
    const PeekResult peeked = tree_.peek(path.first, key, partial);
    expect_equal(peeked.pages, pages, "pages peeked");
    expect_equal(peeked.host_pages, all_tiers - pages, "pages peeked on other tiers");
    expect_equal(peeked.partial, inside, "symbols peeked inside a page");

    std::size_t known = 0;
    const auto note = [&](std::size_t symbols) { known = symbols; };
    const auto refuse = [&](std::size_t) { throw Refused{}; };
    const TreeStats before = tree_.stats();
    if (choose_.one_in(8)) {
      thrown<Refused>("a rejected match", [&] { tree_.match(path.first, key, partial, refuse); });
      expect_equal(tree_.stats().match_calls, before.match_calls, "calls counted of a rejected match");
      return;
    }
    const bool noted = choose_.one_in(2);
    const MatchResult found = tree_.match(path.first, key, partial, noted ? CheckRest(note) : CheckRest());
    expect_equal(found.pages, pages, "pages matched");
    for (std::uint32_t page = 0; page < all_tiers; ++page) {
      ++uses_[front(path, page + 1)].hits;
      demoted_.erase(front(path, page + 1));
    }
    expect_equal(found.host_pages, all_tiers - pages, "pages matched on other tiers");
    expect_equal(found.partial, inside, "symbols matched inside a page");
    expect_equal(found.reach_pages, longest(path, 0, 1), "the reach of the first component");
    if (noted) expect(known >= std::size_t{all_tiers} * page_size, "the symbols known");
    if (noted) expect(known * symbol_bytes <= path.second.size(), "not more symbols known than asked");
    if (rows_.back().kind != Kind::state) compare_pending(path, all_tiers, found.pending_pages);
    if (inside) {
      const Path donor{path.first, path.second.substr(0, std::size_t{pages} * page_bytes() + inside * symbol_bytes)};
      expect(begins_with(path_of(found.partial_id), donor), "the page that a match ends in");
      Ids ids(tree_.end(found.partial_node));
      tree_.copy_ids(found.partial_node, 0, 0, 0, ids.data());
      expect_equal(ids[pages], found.partial_id, "the first page of the node that a match ends in");
    }
    compare_ids(found.node, front(path, pages));
    remember(found.node, front(path, pages));
    remember(found.host_node, front(path, all_tiers));
    const TreeStats after = tree_.stats();
    expect_equal(after.match_calls, before.match_calls + 1, "matches counted");
    expect_equal(after.queried_symbols, before.queried_symbols + path.second.size() / symbol_bytes, "queried");
    expect_equal(after.hit_symbols, before.hit_symbols + std::uint64_t{pages} * page_size, "hit");
  }
  Path path_of(std::int32_t id) const {
    for (const auto& [path, cells] : model_)
      if (cells[0].id == id) return path;
    return {};
  }
  void compare_pending(const Path& path, std::uint32_t from, std::uint32_t found) const {
    std::uint32_t pending = 0;
    for (std::uint32_t page = from; page < pages_of(path.second); ++page, ++pending) {
      const auto at = model_.find(front(path, page + 1));
      if (at == model_.end()) break;
      const auto in_flight = [](const PageCell& c) { return c.presence == Presence::in_flight; };
      if (std::none_of(at->second.begin(), at->second.end(), in_flight)) break;
    }
    expect_equal(found, pending, "pages pending");
  }

  void insert() {
    Path path = some_path();
    const auto tier = choose_.below(tiers_);
    const bool ready = !choose_.one_in(4);
    const auto priority = static_cast<std::int32_t>(choose_.below(3));
    const Place after = choose_.one_in(2) ? some_place() : Place{0, {path.first, ""}};
    const std::uint32_t begin = pages_of(after.path.second);
    const std::string tail = path.second;
    path = {after.path.first, after.path.second + tail};
    const std::uint32_t end = pages_of(path.second);

    doing("insert to", path, begin, tier, ready);
    std::vector<Ids> ids(rows_.size());
    std::vector<IdSpan> spans;
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      ids[c] = new_ids(rows_[c].per_page() ? end - begin : choose_.below(2));
      if (rows_[c].kind == Kind::window)
        std::fill_n(ids[c].begin(), choose_.below(static_cast<std::uint32_t>(ids[c].size()) + 1), -1);
      spans.push_back(ids[c]);
    }
    for (std::uint32_t c = 0; after.handle && c < rows_.size(); ++c)
      if (!bears_children(after, c, tier)) {
        thrown<BadValue>("an insertion after a node in flight, or without pages",
                         [&] { tree_.insert(path.first, after.handle, {bytes_of(tail), spans}, 0, tier, ready); });
        return;
      }
    const InsertResult added = tree_.insert(path.first, after.handle, {bytes_of(tail), spans}, priority, tier, ready);
    for (std::uint32_t page = begin; page < added.pages; ++page) {
      const Path here = front(path, page + 1);
      demoted_.erase(here);
      std::int32_t& known = uses_[here].priority;
      known = exists(here) ? std::max(known, priority) : priority;
    }
    adopt(path, begin, ids, tier, ready, added);
  }
  bool bears_children(const Place& place, std::uint32_t component, std::uint32_t tier) const {
    const Presence presence = cell(place.path, column_of(component, tier)).presence;
    return presence == Presence::present || (presence == Presence::absent && rows_[component].kind != Kind::full);
  }

  // Where the insertion must stop, considering only cells with one id per page.
  std::uint32_t stop_of(const Path& path, std::uint32_t begin, const std::vector<Ids>& ids, std::uint32_t tier,
                        bool ready) const {
    for (std::uint32_t page = begin; page < pages_of(path.second); ++page) {
      const Path here = front(path, page + 1);
      if (!exists(here)) break;
      for (std::uint32_t c = 0; c < rows_.size(); ++c) {
        if (!rows_[c].per_page()) continue;
        const Presence presence = cell(here, column_of(c, tier)).presence;
        const bool hole = !ready && presence == Presence::absent && ids[c][page - begin] >= 0;
        if (presence == Presence::in_flight || hole) return page;
      }
    }
    return pages_of(path.second);
  }
  bool state_in_flight_below(const Path& path, std::uint32_t tier) const {
    for (const Flight& flight : flights_)
      for (const auto& [at, column] : flight.cells)
        if (flight.tier == tier && rows_[column / tiers_].kind == Kind::state && begins_with(at, path)) return true;
    return false;
  }

  void adopt(const Path& path, std::uint32_t begin, const std::vector<Ids>& ids, std::uint32_t tier, bool ready,
             const InsertResult& added) {
    const std::uint32_t all = pages_of(path.second);
    const std::uint32_t expected = stop_of(path, begin, ids, tier, ready);
    const Path reached = front(path, added.pages);
    if (added.pages != expected)
      expect(added.pages < expected && state_in_flight_below(reached, tier), "where an insertion stopped");
    Flight flight{{added.node, reached}, tier, {}};
    std::uint32_t existing = added.pages;
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      const std::size_t column = column_of(c, tier);
      const bool whole = added.pages == all;
      const bool state = !rows_[c].per_page();  // belongs to the last page, which may be the one of `after`
      if (state && (!whole || ids[c].empty())) continue;
      for (std::uint32_t page = state && all ? all - 1 : begin; page < added.pages; ++page) {
        const std::int32_t id = state ? ids[c][0] : ids[c][page - begin];
        const Path here = front(path, page + 1);
        if (id < 0 || cell(here, column).presence != Presence::absent) continue;
        put(here, column, {ready ? Presence::present : Presence::in_flight, id});
        if (!ready) flight.cells.insert({here, column});
        if (c == 0) existing = std::min(existing, page);
      }
    }
    expect_equal(added.existing, existing, "pages that existed");
    if (!flight.cells.empty()) flights_.push_back(flight);
    remember(added.node, reached);
  }

  void evict() {
    const std::uint32_t c = choose_.below(static_cast<std::uint32_t>(rows_.size()));
    const std::uint32_t tier = choose_.below(tiers_);
    const std::uint32_t want = choose_.one_in(4) ? choose_.below(20) : 1 + choose_.below(3);
    const CellCounts counts = tree_.counts(c, tier);
    doing("evict", {}, want, c, tier);
    std::int32_t victim = first_victim(c, tier);
    const Handle next = tree_.next_victim(c, tier);
    expect_equal(next != 0, victim >= 0, "whether there is a victim");
    if (next) {
      const Ids own = tree_.own_ids(next, c, tier);
      const std::int32_t first = rows_[c].leaf_only() ? own.back() : own.front();
      // Windows and states are ranked by their own use, which a node does not show; a policy that remembers uses more
      // than a rank.
      if (!rows_[c].leaf_only() || ((remembers() || (advised_ && tier == 0)) && c == 0)) victim = first;
      expect_equal(first, victim, "the next victim");
    }
    const std::vector<Ids> freed = tree_.evict(want, c, tier);
    expect_equal(freed[c].size(), std::min<std::uint64_t>(want, counts.present - counts.locked), "ids evicted");
    if (want && victim >= 0) expect(contains(freed[c], victim), "the lowest rank is evicted first");
    take(freed, tier);
  }
  static bool contains(const Ids& ids, std::int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

  // The id that the policy must evict first, found by a scan of all nodes; -1: none.
  std::int32_t first_victim(std::uint32_t component, std::uint32_t tier) const {
    const std::size_t column = column_of(component, tier);
    struct Candidate {
      Rank rank;
      std::uint32_t start;
      std::uint32_t index;
      std::int32_t id;
    };
    std::vector<Candidate> candidates;
    for (const std::string& ns : tree_.namespaces()) {
      const std::vector<NodeView> views = tree_.nodes(ns);
      for (const NodeView& view : views) {
        const CellView& at = view.cells[column];
        const bool below = std::any_of(views.begin(), views.end(), [&](const NodeView& other) {
          return other.parent == view.stats.node && other.cells[column].presence != Presence::absent;
        });
        const bool full = rows_[component].kind == Kind::full;
        if (at.presence != Presence::present || at.locks || (full && below)) continue;
        const bool goes_first = demoted(tree_.path_key(view.stats.node)) > tier;
        const Rank last{std::numeric_limits<double>::lowest(), static_cast<double>(view.stats.accessed)};
        candidates.push_back({goes_first ? last : rank(view.stats), view.stats.start,
                              static_cast<std::uint32_t>(view.stats.node), full ? at.ids.back() : at.ids.front()});
      }
    }
    const auto first = [](const Candidate& a, const Candidate& b) {
      return std::tie(a.rank.major, a.rank.minor, a.start, a.index) <
             std::tie(b.rank.major, b.rank.minor, b.start, b.index);
    };
    const auto found = std::min_element(candidates.begin(), candidates.end(), first);
    return found == candidates.end() ? -1 : found->id;
  }
  bool remembers() const {
    return std::any_of(std::begin(kPolicies), std::end(kPolicies),
                       [&](const Policy& policy) { return policy.name == shape_.policy && policy.make; });
  }
  // The policies again, in one line each.
  Rank rank(const NodeStats& n) const {
    const auto accessed = static_cast<double>(n.accessed);
    if (shape_.policy == "lru" || remembers()) return {accessed, 0};
    if (shape_.policy == "mru") return {-accessed, 0};
    if (shape_.policy == "fifo") return {static_cast<double>(n.created), 0};
    if (shape_.policy == "filo") return {-static_cast<double>(n.created), 0};
    if (shape_.policy == "lfu") return {static_cast<double>(n.hits), accessed};
    if (shape_.policy == "slru") return {n.hits >= 2 ? 1.0 : 0.0, accessed};
    expect(shape_.policy == "priority", "a policy has its line here");
    return {static_cast<double>(n.priority), accessed};
  }

  // The ids that the tree freed were its own, and nobody held them.
  void take(const std::vector<Ids>& freed, std::uint32_t tier) {
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      for (const std::int32_t id : freed[c]) {
        const std::size_t column = column_of(c, tier);
        const auto owner = [&](const auto& page) { return page.second[column].id == id; };
        const auto found = std::find_if(model_.begin(), model_.end(), owner);
        expect(found != model_.end(), "a freed id was the tree's");
        const Path path = found->first;
        expect(cell(path, column).presence == Presence::present && !is_held(path, c, tier), "it could be evicted");
        put(path, column, {});
      }
  }

  // A valid handle, or the root's.
  Place some_place() {
    while (!places_.empty()) {
      const std::uint32_t at = choose_.below(static_cast<std::uint32_t>(places_.size()));
      try {
        tree_.end(places_[at].handle);
        return places_[at];
      } catch (const StaleHandle&) {
        for (const auto& call : {&Tree::lock, &Tree::unlock})
          thrown<StaleHandle>("a stale handle", [&] { (tree_.*call)(places_[at].handle, 0); });
        places_.erase(places_.begin() + at);
      }
    }
    return {0, {"", ""}};
  }

  void lock() {
    const Place place = some_place();
    const std::uint32_t tier = choose_.below(tiers_);
    doing("lock", place.path, tier);
    tree_.lock(place.handle, tier);
    if (place.handle) holds_.push_back({place, tier});
  }
  void unlock() {
    if (holds_.empty()) return tree_.unlock(0, 0);
    const std::uint32_t at = choose_.below(static_cast<std::uint32_t>(holds_.size()));
    const Hold hold = holds_[at];
    doing("unlock", hold.place.path, hold.tier, hold.retained);
    holds_.erase(holds_.begin() + at);
    if (hold.retained)
      expect(tree_.end_retention(hold.place.handle, hold.tier) == kept_alone(hold.place.path, hold.tier),
             "the ids that no other retention keeps");
    else
      tree_.unlock(hold.place.handle, hold.tier);
  }

  // ---------------------------------------------------------------- retention

  bool is_retained(const Path& page, std::uint32_t component, std::uint32_t tier) const {
    return std::any_of(holds_.begin(), holds_.end(), [&](const Hold& h) {
      return h.retained && h.tier == tier && held_by(h.place.path, page, component);
    });
  }
  // What a retention of a prefix keeps, by component, and no other one does.
  IdCounts kept_alone(const Path& path, std::uint32_t tier) const {
    IdCounts ids{};
    for (std::uint32_t end = 1; end <= pages_of(path.second); ++end)
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        ids[c] += held_by(path, front(path, end), c) && !is_retained(front(path, end), c, tier);
    return ids;
  }
  // How far a tier alone has a path, and `room` allows; full attention decides how far that is.
  std::uint32_t retainable(Path path, std::uint32_t tier, const IdCounts& room) const {
    const auto full_fits = [&](std::uint32_t end) { return kept_alone(front(path, end), tier)[0] <= room[0]; };
    std::uint32_t end = pages_of(path.second);
    while (end > 0 && !(full_fits(end) && allowed(path, end, tier, rows_.size(), tier)))
      --end;
    const IdCounts ids = kept_alone(front(path, end), tier);
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (ids[c] > room[c]) return 0;
    return end;
  }
  void retain() {
    const std::uint32_t tier = choose_.below(tiers_);
    const Place place = choose_.one_in(3) ? some_place() : Place{0, {"", ""}};
    const Path path = place.handle ? place.path : front_pages(some_path());
    IdCounts room{};
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      room[c] = choose_.one_in(3) ? choose_.below(4) : 100;
    doing("retain", path, tier, room[0], place.handle != 0);
    std::uint32_t end = retainable(path, tier, room);
    if (place.handle && end < pages_of(path.second)) end = 0;
    const IdCounts alone = end ? kept_alone(front(path, end), tier) : IdCounts{};
    const Retained kept = place.handle ? tree_.retain(place.handle, tier, room)
                                       : tree_.retain(path.first, bytes_of(path.second), tier, room);
    expect_equal(kept.pages, end, "pages retained");
    expect(kept.alone == alone, "ids that only this retention keeps");
    expect((kept.node == 0) == (end == 0), "a retention has an end");
    if (kept.node) holds_.push_back({{kept.node, front(path, end)}, tier, true});
    thrown<NotLocked>("the end of a retention of nothing", [&] { tree_.end_retention(0, tier); });
  }

  // ---------------------------------------------------------------- demotion

  std::uint32_t demoted(const Path& page) const {
    const auto found = demoted_.find(page);
    return found == demoted_.end() ? 0 : found->second;
  }
  // How many different pages follow a prefix.
  std::size_t forks(const Path& path) const {
    std::set<Path> following;
    const auto note = [&](const Path& other) {
      if (begins_with(other, path) && other != path) following.insert(front(other, pages_of(path.second) + 1));
    };
    for (const auto& page : model_)
      note(page.first);
    for (const Hold& hold : holds_)
      note(hold.place.path);
    return following.size();
  }
  void demote() {
    const Path asked = front_pages(some_path());
    Path path = asked;
    while (!path.second.empty() && !exists(path))
      path = front(path, pages_of(path.second) - 1);
    const std::uint32_t tiers = 1 + choose_.below(tiers_);
    doing("demote", asked, tiers);
    const std::vector<Handle> nodes = tree_.demote(asked.first, bytes_of(asked.second), tiers);
    const bool there = !path.second.empty() && (path == asked || forks(path) == 0);
    expect_equal(!nodes.empty(), there, "whether a prefix is there");
    if (nodes.empty()) return;
    const auto note = [&](const Path& page) { demoted_[page] = std::max(demoted(page), tiers); };
    const auto note_all = [&](const Path& other) {
      for (std::uint32_t end = pages_of(path.second); begins_with(other, path) && end <= pages_of(other.second); ++end)
        note(front(other, end));
    };
    for (const auto& page : model_)
      note_all(page.first);
    for (const Hold& hold : holds_)
      note_all(hold.place.path);
    for (std::uint32_t end = pages_of(path.second) - 1; end > 0 && forks(front(path, end)) == 1; --end)
      note(front(path, end));
  }
  // ---------------------------------------------------------------- expected uses

  // Which node goes next is left to the tree from now on; whatever goes, it holds what the model holds.
  void advise() {
    now_ += choose_.below(20);
    tree_.note_time(now_);
    const Path asked = front_pages(some_path());
    std::uint32_t pages = pages_of(asked.second);
    while (pages > 0 && !exists(front(asked, pages)))
      --pages;
    const auto account = static_cast<Account>(1 + choose_.below(3));
    doing("expect", asked, account);
    expect_equal(tree_.expect(asked.first, bytes_of(asked.second), account, now_, now_ + choose_.below(200)), pages,
                 "how much of a prefix is there");
    advised_ = advised_ || pages > 0;
    thrown<BadValue>("advice of nobody", [&] { tree_.expect(asked.first, bytes_of(asked.second), 0, now_, now_); });
  }

  Path front_pages(const Path& path) const { return front(path, pages_of(path.second)); }
  void move_lock() {
    const std::uint32_t tier = choose_.below(tiers_);
    const Place to = some_place();
    doing("move a lock to", to.path, tier);
    for (Hold& hold : holds_) {
      if (hold.tier != tier || hold.retained || !begins_with(to.path, hold.place.path) || to.handle == 0) continue;
      tree_.move_lock(hold.place.handle, to.handle, tier);
      hold.place = to;
      return;
    }
    tree_.move_lock(0, to.handle, tier);
    if (to.handle) holds_.push_back({to, tier});
  }

  void attach() {
    const Place place = some_place();
    if (!place.handle) {
      thrown<BadValue>("an attachment to the root", [&] { tree_.attach(0, 0, 0, {}, true); });
      return;
    }
    const std::uint32_t c = choose_.below(static_cast<std::uint32_t>(rows_.size()));
    const std::uint32_t tier = choose_.below(tiers_);
    const NodeView view = view_of(place);
    const std::size_t column = column_of(c, tier);
    const Ids ids = new_ids(rows_[c].per_page() ? view.stats.pages : 1);
    const bool ready = choose_.one_in(2);
    doing("attach to", place.path, c, tier, ready);
    const bool orphan = c == 0 && view.stats.start > 0 &&
                        cell(front(place.path, view.stats.start), column).presence == Presence::absent;
    if (view.cells[column].presence != Presence::absent || orphan) {
      thrown<BadValue>("a cell that must not be filled", [&] { tree_.attach(place.handle, c, tier, ids, ready); });
      return;
    }
    tree_.attach(place.handle, c, tier, ids, ready);
    note_attached(place, c, tier, ids, ready);
  }
  // The ids belong to the last pages of the path.
  void note_attached(const Place& place, std::uint32_t component, std::uint32_t tier, const Ids& ids, bool ready) {
    const std::size_t column = column_of(component, tier);
    Flight flight{place, tier, {}};
    std::uint32_t end = pages_of(place.path.second) - static_cast<std::uint32_t>(ids.size());
    for (const std::int32_t id : ids) {
      const Path here = front(place.path, ++end);
      put(here, column, {ready ? Presence::present : Presence::in_flight, id});
      flight.cells.insert({here, column});
    }
    if (!ready) flights_.push_back(flight);
  }
  // Locates the end of some pages of a key, which may be inside a node; nothing else changes.
  void locate() {
    const Path path = some_path();
    const std::uint32_t pages = choose_.below(pages_of(path.second) + 2);
    doing("locate", path, pages);
    const bool there = pages > 0 && pages <= pages_of(path.second) && exists(front(path, pages));
    const TreeStats before = tree_.stats();
    const Handle found = tree_.locate(path.first, bytes_of(path.second), pages);
    expect_equal(found != 0, there, "whether the tree has the pages");
    expect_equal(tree_.stats().match_calls, before.match_calls, "calls counted, as if it had been a match");
    if (!found) return expect_equal(tree_.stats().splits, before.splits, "splits for absent pages");
    expect_equal(tree_.end(found), pages, "the end of the place");
    remember(found, front(path, pages));
  }

  // Copies to one tier what it lacks of a path, as a controller does: locks all nodes, which may split one where a
  // window begins; then everything is in flight at once, each node in its own transfer.
  void back_up() {
    if (tiers_ == 1) return;
    const Place place = some_place();
    const std::uint32_t to = choose_.below(tiers_);
    const std::uint32_t from = tiers_ - 1 - to;
    doing("back up", place.path, to);
    std::vector<Handle> nodes;
    for (std::set<Handle> held; held.size() < (nodes = tree_.lacking(place.handle, from, to, 0)).size();)
      for (const Handle node : nodes)
        if (held.insert(node).second)
          for (const std::uint32_t tier : {from, to}) {
            tree_.lock(node, tier);
            holds_.push_back({{node, front(place.path, tree_.end(node))}, tier});
          }
    for (const Handle node : nodes)
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        back_up_cell({node, front(place.path, tree_.end(node))}, c, from, to);
    expect(tree_.lacking(place.handle, from, to, 0).empty(), "nothing is lacking any more");
  }
  void back_up_cell(const Place& place, std::uint32_t component, std::uint32_t from, std::uint32_t to) {
    const Ids there = tree_.own_ids(place.handle, component, from);
    if (there.empty() || tree_.presence(place.handle, component, to) != Presence::absent) return;
    const Ids ids = new_ids(there.size());
    tree_.attach(place.handle, component, to, ids, false);
    note_attached(place, component, to, ids, false);
  }
  NodeView view_of(const Place& place) const {
    for (NodeView& view : tree_.nodes(place.path.first))
      if (view.stats.node == place.handle) return std::move(view);
    throw Failure{"a good handle is in the list of nodes"};
  }

  // Commits or cancels a transfer, which may have several attachments.
  void end_transfer() {
    if (flights_.empty()) return;
    const Flight first = flights_[choose_.below(static_cast<std::uint32_t>(flights_.size()))];
    doing("commit or cancel", first.place.path, first.tier);
    const auto same = [&](const Flight& f) { return f.place.handle == first.place.handle && f.tier == first.tier; };
    std::set<std::pair<Path, std::size_t>> cells;
    for (const Flight& flight : flights_)
      if (same(flight)) cells.insert(flight.cells.begin(), flight.cells.end());
    if (choose_.one_in(2)) {
      tree_.commit(first.place.handle, first.tier);
      for (const auto& [path, column] : cells)
        put(path, column, {Presence::present, cell(path, column).id});
    } else {
      const auto cancel = [&] { return tree_.cancel(first.place.handle, first.tier); };
      if (bears(cells, false)) {
        // Nodes on this tier alone are removed with it: tests/cache/test_stateful.py knows how.
        if (bears(cells, true)) thrown<BadValue>("a cancellation above nodes on both tiers", cancel);
        return;
      }
      const std::vector<Ids> freed = cancel();
      std::size_t n = 0;
      for (const Ids& ids : freed)
        n += ids.size();
      expect_equal(n, cells.size(), "ids cancelled");
      for (const auto& [path, column] : cells) {
        expect(contains(freed[column / tiers_], cell(path, column).id), "an id in flight is returned");
        put(path, column, {});
      }
    }
    std::erase_if(flights_, same);
    remember_if_there(first.place);
  }
  // Whether there are further full cells below cells in flight, on another tier as well if `elsewhere`.
  bool bears(const std::set<std::pair<Path, std::size_t>>& cells, bool elsewhere) const {
    const auto counts = [&](const std::vector<PageCell>& page, std::size_t column) {
      for (std::size_t other = 0; elsewhere && other < page.size(); ++other)
        if (other % tiers_ != column % tiers_ && page[other].presence != Presence::absent) return true;
      return !elsewhere;
    };
    for (const auto& [path, column] : cells) {
      if (rows_[column / tiers_].kind != Kind::full) continue;
      for (auto at = model_.lower_bound(path); at != model_.end() && begins_with(at->first, path); ++at)
        if (at->second[column].presence != Presence::absent && !cells.contains({at->first, column}) &&
            counts(at->second, column))
          return true;
    }
    return false;
  }
  void remember_if_there(const Place& place) {
    if (exists(place.path)) remember(place.handle, place.path);
  }

  // Forbidden calls throw an error, and change nothing.
  void refuse() {
    const Place place = some_place();
    const std::uint32_t tier = choose_.below(tiers_);
    const auto same = [&](const Place& other) { return other.handle == place.handle; };
    const bool locked =
        std::any_of(holds_.begin(), holds_.end(), [&](const Hold& h) { return same(h.place) && h.tier == tier; });
    doing("refuse at", place.path, tier, locked);
    const bool in_flight =
        std::any_of(flights_.begin(), flights_.end(), [&](const Flight& f) { return same(f.place) && f.tier == tier; });
    if (place.handle && !locked) {
      const NotLocked error = thrown<NotLocked>("an unlock too many", [&] { tree_.unlock(place.handle, tier); });
      expect_equal(error.handle, place.handle, "the handle that is not locked");
      thrown<NotLocked>("a move of no lock", [&] { tree_.move_lock(place.handle, 0, tier); });
    }
    if (!in_flight) {
      thrown<BadValue>("a commit of nothing", [&] { tree_.commit(place.handle, tier); });
      thrown<BadValue>("a cancellation of nothing", [&] { tree_.cancel(place.handle, tier); });
    }
    thrown<StaleHandle>("a handle of no node", [&] { tree_.end(Handle{7} << 40 | 3); });
    thrown<BadValue>("a tier too many", [&] { tree_.evict(1, 0, tiers_); });
  }

  Choices choose_;
  const Shape shape_;
  const std::vector<Component> rows_;
  const std::uint32_t tiers_;
  const std::size_t columns_;
  Tree tree_;
  Contents model_;
  std::set<Path> ever_;  // present at some time
  Uses uses_;
  double now_ = 0;
  bool advised_ = false;
  std::map<Path, std::uint32_t> demoted_;  // by page: on how many tiers it goes first
  std::vector<Place> places_;
  std::vector<Hold> holds_;
  std::vector<Flight> flights_;
  std::int32_t next_id_ = 0;
  std::string doing_;
};

}  // namespace

void random_tree(std::uint64_t seed, std::uint32_t operations) {
  Choices choose(seed);
  for (const Shape& shape : shapes(choose)) {
    TreeWorld world(shape, seed);
    std::string rows;
    for (const Component& row : shape.rows)
      rows += " " + std::to_string(static_cast<int>(row.kind));
    drive(world,
          "tree, " + shape.policy + ", page " + std::to_string(shape.page_size) + ", tiers " +
              std::to_string(shape.tiers) + ", rows" + rows,
          seed, operations);
  }
}

}  // namespace mainstem
