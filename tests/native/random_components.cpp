// Random operations on caches with windows and states: leases that slide, take checkpoints and publish them. The test
// records what is written to each page and slot, to verify that a lease reads its own prefix. After each step it counts
// all ids: free, in one cell of the tree, or one lease's. It computes the worth of states independently, and checks
// evictions against it.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "random_operations.h"
#include "worlds.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kSymbolBytes = 4;

struct Shape {
  std::vector<Component> rows;
  std::uint32_t page_size, ids;
  bool enabled, hook;
};

// A lease, and its expected properties.
struct Holder {
  std::unique_ptr<Lease> lease;
  std::string ns, key;
  std::uint64_t computed = 0;              // positions
  std::uint64_t published = 0;             // pages
  std::vector<std::uint32_t> fronts = {};  // by component: earlier entries are -1
  std::optional<std::uint64_t> mark = {};  // pages before a state that waits to be published
};

class ComponentWorld : Paging {
 public:
  ComponentWorld(const Shape& shape, std::uint64_t seed)
      : Paging{kSymbolBytes, shape.page_size},
        choose_(seed),
        shape_(shape),
        rows_(shape.rows),
        tree_(kSymbolBytes, shape.page_size, shape.rows, 1, "lru", seed),
        written_(rows_.size(), std::vector<Path>(shape.ids)),
        dropped_(rows_.size()) {
    std::vector<Pool*> pools;
    for (std::size_t c = 0; c < rows_.size(); ++c)
      pools.push_back(pools_.emplace_back(std::make_unique<Pool>(shape.ids)).get());
    cache_ = std::make_unique<Cache>(tree_, std::move(pools), shape.enabled);
    cache_->copy_state = [this](std::int32_t source, std::int32_t target) {
      written_.back()[static_cast<std::size_t>(target)] = written_.back()[static_cast<std::size_t>(source)];
    };
    if (shape.hook || rows_.back().weighs)
      cache_->evict = [this](std::uint32_t component, std::uint64_t ids, std::string_view) { evict(component, ids); };
  }

  void step() {
    if (open_.empty() || choose_.one_in(5))
      open();
    else if (choose_.one_in(10))
      evict(choose_.below(static_cast<std::uint32_t>(rows_.size())), choose_.below(3));
    else
      use(open_[choose_.below(static_cast<std::uint32_t>(open_.size()))]);
    if (open_.size() > 4) close(open_.front());
    std::erase_if(open_, [](const Holder& holder) { return holder.lease == nullptr || holder.lease->closed(); });
    for (const Holder& h : open_)
      seen_.emplace(h.ns, h.key);
    compare();
  }

  void finish() {
    while (!open_.empty()) {
      close(open_.back());
      open_.pop_back();
    }
    take_back();
    compare();
    expect_equal(cache_->counters.open, 0, "open leases left");
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      expect_equal(tree_.counts(c, 0).locked, 0, "ids locked in the end");
      evict(c, shape_.ids);
    }
    for (const auto& pool : pools_)
      expect_equal(pool->owned(Owner::free), shape_.ids, "free ids in the end");
    expect_equal(tree_.size(), 0, "nodes left");
  }

 private:
  bool keeps_states() const { return !rows_.back().per_page(); }
  std::uint32_t states() const { return static_cast<std::uint32_t>(rows_.size() - 1); }
  Path& written(std::uint32_t c, std::int32_t id) { return written_[c][static_cast<std::size_t>(id)]; }
  const Path& written(std::uint32_t c, std::int32_t id) const { return written_[c][static_cast<std::size_t>(id)]; }
  Contents contents() const { return contents_of(tree_, rows_, 1); }

  // ---------------------------------------------------------------- the worth of a state

  static bool has_state(const Contents& held, const Path& path) {
    const auto found = held.find(path);
    return found != held.end() && found->second.back().presence == Presence::present;
  }
  // Pages since the nearest state above.
  std::uint64_t saved(const Contents& held, const Path& path) const {
    const std::uint64_t length = path.second.size() / page_bytes();
    std::uint64_t above = length - 1;
    while (above > 0 && !has_state(held, {path.first, path.second.substr(0, above * page_bytes())}))
      --above;
    return length - above;
  }
  // A state has come here, or a match has used it.
  void credit(const Path& path, bool used) {
    if (!rows_.back().weighs) return;
    bases_[path] = inflation_;
    uses_[path] = used ? std::min(uses_[path] + 1, 255) : 0;
  }
  std::set<Path> locked_states() const {
    std::set<Path> paths = left_;
    for (const Holder& h : open_)
      if (h.lease && !h.lease->closed()) paths.insert(front(h, h.published));
    return paths;
  }
  // What the tree has noted of each state: its worth when it was last counted, and whether it is superseded.
  std::map<Path, Standing> standings() const {
    std::map<Path, Standing> found;
    for (const std::string& ns : tree_.namespaces()) {
      std::map<Handle, std::string> keys{{0, ""}};
      for (const NodeView& node : tree_.nodes(ns)) {
        const std::string& key = keys[node.stats.node] = keys.at(node.parent) + node.key;
        if (node.cells.back().presence == Presence::present)
          found[{ns, key}] = Probe::standing(tree_, node.stats.node, states());
      }
    }
    return found;
  }
  double worth(const Contents& held, const Path& path, const Standing& noted) const {
    const double likely = noted.superseded ? kSuperseded : std::pow(1 + uses_.at(path), 0.25);
    return bases_.at(path) + likely * static_cast<double>(saved(held, path));
  }
  // The state of the least worth is evicted first. Worths are counted again at the latest when they are the least.
  void expect_least_worth(const Contents& before, const std::map<Path, Standing>& noted, const Path& victim) const {
    const std::set<Path> locked = locked_states();
    expect(!locked.contains(victim), "a locked state stays");
    const double least = worth(before, victim, noted.at(victim));
    for (const auto& [path, standing] : noted)
      if (!locked.contains(path))
        expect(least <= std::max(standing.worth, worth(before, path, standing)) + 1e-9,
               "the state of the least worth is evicted first");
  }

  // Evicts one id after another, sometimes fewer than requested: the cache has to call again.
  void evict(std::uint32_t component, std::uint64_t ids) {
    if (ids > 1 && ids < shape_.ids && choose_.one_in(3)) ids = 1;
    for (const std::uint64_t wanted = tree_.counts(component, 0).present; ids-- > 0 && wanted > 0;) {
      const Contents before = contents();
      const std::map<Path, Standing> noted = keeps_states() ? standings() : std::map<Path, Standing>();
      const std::vector<Ids> freed = tree_.evict(1, component, 0);
      for (std::size_t c = 0; c < freed.size(); ++c)
        pools_[c]->move(freed[c], Owner::cached, Owner::free);
      if (!rows_[component].weighs || freed[component].empty()) continue;
      expect_equal(freed[component].size(), 1, "states evicted");
      const Path& victim = written(component, freed[component].front());
      expect_least_worth(before, noted, victim);
      const double least = std::max(noted.at(victim).worth, worth(before, victim, noted.at(victim)));
      inflation_ += kAging * std::max(least - inflation_, 0.0);
    }
  }

  // ---------------------------------------------------------------- invariants

  void compare() const {
    tree_.check();
    const Contents held = contents();
    std::vector<std::set<std::int32_t>> owned(rows_.size());
    for (const auto& [path, cells] : held)
      for (std::uint32_t c = 0; c < rows_.size(); ++c) {
        if (cells[c].presence == Presence::absent) continue;
        expect(owned[c].insert(cells[c].id).second, "an id is in one cell");
        expect(pools_[c]->owner(cells[c].id) == std::string("cached"), "an id of the tree is cached");
        expect(written(c, cells[c].id) == path, "an id of the tree was written for its prefix");
      }
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      expect_equal(pools_[c]->owned(Owner::cached), owned[c].size(), "cached ids");
    std::vector<std::uint64_t> privately = dropped_;
    for (const Holder& h : open_)
      for (std::uint32_t c = 0; c < rows_.size(); ++c)
        privately[c] += rows_[c].per_page() ? compare_table(h, c, held, &owned[c]) : compare_state(h, &owned[c]);
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      expect(pools_[c]->sound(), "the pool is sound");
      expect_equal(pools_[c]->owned(Owner::privately), privately[c], "private ids");
    }
  }
  // Checks a table, and that nobody else has its private ids. Returns their number.
  std::uint64_t compare_table(const Holder& h, std::uint32_t c, const Contents& held,
                              std::set<std::int32_t>* owned) const {
    const Table& table = h.lease->table(c);
    std::uint64_t own = 0;
    for (std::uint32_t page = 0; page < table.size(); ++page) {
      const std::int32_t id = *table.from(page).data();
      expect_equal(id < 0, page < h.fronts[c], "whether an entry is before the window");
      if (id < 0) continue;
      if (page < h.published) {
        const auto found = held.find(front(h, page + 1));
        expect(found != held.end() && found->second[c].id == id, "a published page is the tree's own");
      } else {
        expect(owned->insert(id).second && pools_[c]->owner(id) == std::string("private"), "a page is this lease's");
        ++own;
      }
      if ((page + 1) * page_size <= h.computed)
        expect(written(c, id) == front(h, page + 1), "a page holds the symbols that lead to it");
    }
    return own;
  }
  std::uint64_t compare_state(const Holder& h, std::set<std::int32_t>* owned) const {
    const std::int32_t slot = h.lease->state();
    expect(slot >= 0 && owned->insert(slot).second, "a state to compute with is this lease's only");
    expect(pools_[states()]->owner(slot) == std::string("private"), "a state to compute with is private");
    if (h.computed)
      expect(written(states(), slot) == Path(h.ns, h.key.substr(0, h.computed * kSymbolBytes)), "a state");
    return 1 + h.mark.has_value();
  }
  // Whether a sequence that was ever seen parts from this one after `end` pages and before `next`.
  bool parts(const Holder& h, std::uint64_t end, std::uint64_t next) const {
    return std::any_of(seen_.begin(), seen_.end(), [&](const Path& other) {
      const std::string& key = other.second;
      const auto same = static_cast<std::size_t>(
          std::mismatch(key.begin(), key.begin() + std::min(key.size(), h.key.size()), h.key.begin()).first -
          key.begin());
      const std::uint64_t pages = same / kSymbolBytes / page_size;
      return other.first == h.ns && same < key.size() && end <= pages && pages < next;
    });
  }
  // A path exceeds the limit of states only while locks hold them, or where other sequences part from them.
  void compare_path(const Holder& h) const {
    const std::uint32_t limit = rows_[states()].most_on_path;
    const Contents held = contents();
    std::set<Path> locked = locked_states();
    locked.insert(front(h, h.published));  // until the lease finished
    std::uint64_t standing = 0, held_fast = 0;
    std::uint64_t next = h.published + 1;  // the state after this one
    for (std::uint64_t end = h.published; end > 0; --end) {
      if (!has_state(held, front(h, end))) continue;
      const std::uint64_t after = std::exchange(next, end);
      ++standing;
      held_fast += locked.contains(front(h, end)) || parts(h, end, after);
    }
    expect(limit == 0 || standing <= std::max<std::uint64_t>(limit, held_fast), "states on one path");
  }

  // ---------------------------------------------------------------- operations

  void open() {
    const std::string ns = choose_.one_in(4) ? "a" : "";
    const std::string key = some_key(choose_, kSymbolBytes, page_size, 7);
    const std::uint64_t length = key.size() / kSymbolBytes;
    const std::uint64_t limit = length == 0 ? 0 : length - choose_.below(2);
    const Bytes known = bytes_of(key).first(limit * kSymbolBytes);
    Holder h{nullptr, ns, key};
    h.published = shape_.enabled ? tree_.peek(ns, known, false).pages : 0;
    h.computed = h.published * page_size;
    const Contents before = contents();
    if (h.published) credit(front(h, h.published), true);
    left_.insert(front(h, h.published));  // while it is not in `open_` yet
    try {
      h.lease = std::make_unique<Lease>(*cache_, ns, 0, bytes_of(key), limit, false, CheckRest());
    } catch (const NoPages& error) {
      collected();
      expect(error.what == std::string("state slots"), "what a lease lacks");
      expect(contents() == before, "a lease that finds no slot evicts none");
      return;
    }
    collected();
    expect_equal(h.lease->hit(), h.computed, "the hit");
    expect_equal(h.lease->published(), h.computed, "positions published");
    expect(h.lease->reach() >= h.computed && h.lease->reach() <= limit, "the reach of the first component");
    h.fronts.resize(rows_.size());
    move_fronts(h, h.computed, h.published);
    open_.push_back(std::move(h));
  }
  // A table starts at the window of `computed`, or of a match at the end of `published` pages, whichever is later.
  void move_fronts(Holder& h, std::uint64_t computed, std::uint64_t published) const {
    for (std::uint32_t c = 0; c < rows_.size(); ++c) {
      if (!rows_[c].begins_late()) continue;
      const std::uint64_t back = rows_[c].kind == Kind::chunked ? computed % rows_[c].span : rows_[c].span;
      const std::uint64_t seen = (computed - std::min(back, computed)) / page_size;
      const std::uint32_t needed = rows_[c].first_needed(static_cast<std::uint32_t>(published), page_size);
      h.fronts[c] = std::max({h.fronts[c], static_cast<std::uint32_t>(seen), needed});
    }
  }

  void use(Holder& h) {
    switch (choose_.below(10)) {
      case 0:
      case 1:
      case 2:
      case 3:
        compute(h);
        break;
      case 4:
      case 5:
        checkpoint(h);
        break;
      case 6:
        publish(h);
        break;
      case 7:
        append(h);
        break;
      case 8:
        close(h);
        break;
      default:
        if (choose_.one_in(2)) drop(h);
    }
  }

  // Computes the next positions, often up to a page's end, and writes private pages.
  void compute(Holder& h) {
    const std::uint64_t left = h.key.size() / kSymbolBytes - h.computed;
    if (left == 0) return;
    std::uint64_t n = choose_.below(static_cast<std::uint32_t>(left)) + 1;
    if (choose_.one_in(2)) n = std::min<std::uint64_t>(left, page_size * (1 + choose_.below(2)));
    const std::uint64_t end = h.computed + n;
    try {
      if (end > h.lease->reserved()) h.lease->reserve(end - h.lease->reserved());
      const std::vector<std::uint32_t> before = h.fronts;
      move_fronts(h, h.computed, h.published);
      for (std::uint32_t c = 0; c < rows_.size(); ++c)  // a table has nothing after its end
        h.fronts[c] = std::max(before[c], std::min<std::uint32_t>(h.fronts[c], static_cast<std::uint32_t>(size(h, c))));
      h.lease->slide(h.computed, end);
    } catch (const NoPages& error) {
      collected();
      const bool paged = error.what == std::string("pages") && !rows_[0].begins_late();
      expect(paged || error.what == std::string("window pages"), "what runs out");
      return;
    }
    take_back();  // unless making room did it
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      for (std::uint64_t page = h.computed / page_size; rows_[c].per_page() && page < pages(end); ++page)
        written(c, *h.lease->table(c).from(page).data()) = front(h, page + 1);
    h.computed = end;
    if (keeps_states()) written(states(), h.lease->state()) = {h.ns, h.key.substr(0, end * kSymbolBytes)};
    if (choose_.one_in(2)) checkpoint(h);
    if (choose_.one_in(3)) publish(h);
  }
  std::uint64_t size(const Holder& h, std::uint32_t c) const {
    return rows_[c].per_page() ? h.lease->table(c).size() : 0;
  }

  void checkpoint(Holder& h) {
    if (h.computed % page_size || h.computed == 0 || h.computed < h.published * page_size) return;
    if (h.computed > h.lease->publishable()) return;
    const bool room = choose_.one_in(2);
    const std::uint64_t free = keeps_states() ? pools_[states()]->owned(Owner::free) : 0;
    const std::uint64_t missed = cache_->counters.checkpoints_missed;
    const bool had = h.mark.has_value();
    const bool done = h.lease->checkpoint(h.computed, room);
    if (!keeps_states() || !shape_.enabled) {
      expect_equal(done, shape_.enabled, "whether a checkpoint succeeds");
      return;
    }
    if (room && !had) collected();
    expect(done || !had, "a checkpoint replaces the previous one");
    if (!room) expect_equal(done, had || free > 0, "whether a checkpoint was taken");
    expect_equal(cache_->counters.checkpoints_missed, missed + !done, "checkpoints missed");
    if (done) h.mark = h.computed / page_size;
  }

  void publish(Holder& h) {
    const std::uint64_t upto = std::min(h.computed, h.lease->publishable());
    publish(h, choose_.one_in(2) ? upto : choose_.below(static_cast<std::uint32_t>(upto) + 1),
            [&](std::uint64_t positions) { h.lease->publish(positions); });
  }
  // Computes first what the call publishes: a waiting state, then what follows it.
  template <class Call>
  void publish(Holder& h, std::uint64_t upto, Call call) {
    const std::uint64_t end = upto / page_size;
    const bool keeps_mark = shape_.enabled && h.mark && *h.mark <= end;
    const Contents before = contents();
    const std::uint64_t checkpoints = cache_->counters.checkpoints;
    const std::uint64_t first = keeps_mark ? std::max(h.published, *h.mark) : h.published;
    const bool outside = rows_[0].begins_late() && end > 0 && end - 1 < h.fronts[0];
    if (shape_.enabled) h.published = end > first && !outside ? end : first;
    if (keeps_mark) {
      const Path path = front(h, *h.mark);
      const bool taken = !has_state(before, path);
      if (taken) credit(path, false);
      call(upto);
      expect_equal(cache_->counters.checkpoints, checkpoints + taken, "states published");
      h.mark.reset();
      if (taken && first == h.published) compare_path(h);
    } else {
      call(upto);
    }
    if (h.lease->closed()) return;
    expect_equal(h.lease->published(), h.published * page_size, "positions published");
    if (shape_.enabled) move_fronts(h, 0, h.published);
  }

  void append(Holder& h) {
    const std::string more = some_key(choose_, kSymbolBytes, page_size, 2);
    h.lease->append(bytes_of(more));
    h.key += more;
  }

  void close(Holder& h) {
    const std::uint64_t upto = std::min(h.computed, h.lease->publishable());
    if (choose_.one_in(3))
      h.lease->abort();
    else
      publish(h, upto, [&](std::uint64_t positions) { h.lease->finish(positions); });
    thrown<Closed>("sliding", [&] { h.lease->slide(0, 0); });
    thrown<Closed>("a checkpoint", [&] { h.lease->checkpoint(page_size, true); });
    thrown<Closed>("the state", [&] { h.lease->state(); });
  }

  // The cache's next call frees the ids and the lock of a dropped lease.
  void drop(Holder& h) {
    for (std::uint32_t c = 0; c < rows_.size(); ++c)
      if (rows_[c].per_page()) {
        const std::uint64_t private_from = std::max<std::uint64_t>(h.published, h.fronts[c]);
        dropped_[c] += size(h, c) - std::min<std::uint64_t>(private_from, size(h, c));
      } else {
        dropped_[c] += 1 + h.mark.has_value();
      }
    left_.insert(front(h, h.published));
    h.lease.reset();
    if (choose_.one_in(2)) take_back();
  }
  void take_back() {
    cache_->end_abandoned();
    collected();
  }
  void collected() {
    std::ranges::fill(dropped_, 0);
    left_.clear();
  }

  Choices choose_;
  const Shape shape_;
  const std::vector<Component>& rows_ = shape_.rows;
  Tree tree_;
  std::vector<std::unique_ptr<Pool>> pools_;
  std::unique_ptr<Cache> cache_;
  std::vector<Holder> open_;
  std::vector<std::vector<Path>> written_;  // by component: the content of each page and slot
  std::vector<std::uint64_t> dropped_;      // by component: private ids of dropped leases
  std::set<Path> seen_;                     // all sequences so far
  std::set<Path> left_;                     // where the locks of dropped leases end
  std::map<Path, double> bases_;            // of states, by GreedyDual: the inflation at their last use
  std::map<Path, int> uses_;                // of states
  double inflation_ = 0;                    // follows the worth of evicted states
};

std::vector<Shape> some_shapes(Choices& choose) {
  std::vector<Shape> shapes;
  const std::uint32_t page_size = choose.of<std::uint32_t>({1, 2, 4});
  const Component full{Kind::full}, window{Kind::window, 1 + choose.below(3 * page_size)};
  const Component state{Kind::state, 0, choose.below(3), choose.one_in(2)};
  const Component chunked{Kind::chunked, 1 + choose.below(3 * page_size)};
  const std::vector<std::vector<Component>> sets{{full, window},  {full, state},   {full, window, state}, {window},
                                                 {window, state}, {full, chunked}, {full, chunked, state}};
  for (const std::vector<Component>& rows : sets)
    shapes.push_back({rows, page_size, choose.of<std::uint32_t>({10, 20, 40}), !choose.one_in(7), choose.one_in(2)});
  return shapes;
}

}  // namespace

void random_components(std::uint64_t seed, std::uint32_t operations) {
  Choices choose(seed);
  for (const Shape& shape : some_shapes(choose)) {
    ComponentWorld world(shape, seed);
    std::string kinds;
    for (const Component& row : shape.rows)
      kinds += std::string(kKindNames[static_cast<std::size_t>(row.kind)]) + " ";
    drive(world, kinds + "cache, page " + std::to_string(shape.page_size) + ", " + std::to_string(shape.ids) + " ids",
          seed, operations);
  }
}

}  // namespace mainstem
