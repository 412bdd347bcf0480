// Random operations on a cache over two tiers, with a simple controller: copies to the host that complete in any order,
// leases that load from the host and are closed or dropped meanwhile, eviction on both tiers. After each operation all
// pages of both pools are counted, the tree holds the same as a map from prefixes to pages, and every page that the
// tree or a table names holds exactly the symbols that lead to it.
#include <algorithm>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "random_operations.h"
#include "worlds.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kSymbolBytes = 4, kDevice = 0, kHost = 1, kTiers = 2;
const std::vector<Component> kRows{{Kind::full}};

enum class Room { by_order, by_hook, by_hook_after_copy };  // what evicts from the device

struct Shape {
  std::uint32_t page_size, pages, host_pages, hits;
  Room room;
  std::string policy;
};

struct Load {
  PageLoad page_load;
  Path path;  // the prefix on the host
};

// A lease, and its expected properties.
struct Holder {
  std::unique_ptr<Lease> lease;
  std::string ns, key;
  std::uint64_t hit = 0, reserved = 0, published = 0, loadable = 0;
  Path host;  // the prefix that it locks on the host
  std::optional<Load> load;
  bool appended = false, counted = false;
};

// What remains of a lease that was closed while its pages were written, or dropped.
struct Left {
  Path device, host;
  std::optional<Load> load;
  std::uint64_t pages;  // private ones
};

// Nodes being copied to the host, with their host pages.
struct Copy {
  struct Part {
    Handle node;
    Path path;
    Ids sources, targets;
  };
  std::vector<Part> parts;
  const Copy* above = nullptr;  // a copy above that is not complete
};

class TiersWorld : Paging {
 public:
  TiersWorld(const Shape& shape, std::uint64_t seed)
      : Paging{kSymbolBytes, shape.page_size},
        choose_(seed),
        shape_(shape),
        tree_(kSymbolBytes, shape.page_size, kRows, kTiers, shape.policy, seed),
        pool_(shape.pages),
        host_(shape.host_pages),
        cache_(tree_, pool_, true),
        written_{std::vector<Path>(shape.pages), std::vector<Path>(shape.host_pages)} {
    if (shape.room != Room::by_order)
      cache_.evict = [this](std::uint32_t, std::uint64_t pages, std::string_view) { make_room(pages); };
  }

  void step() {
    if (open_.empty() || choose_.one_in(6))
      open();
    else if (choose_.one_in(2))
      use(open_[choose_.below(static_cast<std::uint32_t>(open_.size()))]);
    else
      control();
    if (open_.size() > 3) close(open_.front());
    std::erase_if(open_, [](const Holder& h) { return h.lease == nullptr || h.lease->closed(); });
    compare();
  }

  // Releases everything: nothing may be left.
  void finish() {
    for (Holder& h : open_)
      close(h);
    open_.clear();
    while (!loads_left().empty())
      end_left_load();
    while (!copies_.empty())
      end_some_copy();
    take_back();
    compare();
    expect_equal(cache_.counters.open, 0, "open leases left");
    for (const std::uint32_t tier : {kDevice, kHost})
      evict(1000, tier);
    compare();
    expect_equal(pool_.owned(Owner::free), shape_.pages, "free pages in the end");
    expect_equal(host_.owned(Owner::free), shape_.host_pages, "free host pages in the end");
    expect_equal(tree_.size(), 0, "nodes left");
  }

  const std::string& doing() const { return doing_; }

 private:
  Path shared(const Holder& h) const { return front(h, h.published / page_size); }
  Path& content(std::uint32_t tier, std::int32_t page) { return written_[tier][static_cast<std::size_t>(page)]; }
  Pool& pool(std::uint32_t tier) { return tier == kDevice ? pool_ : host_; }

  PageCell cell(const Path& path, std::uint32_t tier) const { return cell_of(model_, path, tier); }
  bool has(const Path& path, std::uint32_t tier) const { return cell(path, tier).presence == Presence::present; }
  void put(const Path& path, std::uint32_t tier, PageCell cell) { put_cell(&model_, path, kTiers, tier, cell); }

  // ---------------------------------------------------------------- invariants

  void compare() {
    tree_.check();
    expect(pool_.sound() && host_.sound(), "the pools are sound");
    expect(contents_of(tree_, kRows, kTiers) == model_, "the tree holds what the model holds");
    std::set<std::int32_t> owned[kTiers], coming;
    std::uint64_t locked_pages[kTiers] = {0, 0};
    const std::set<Path> locked_paths[kTiers] = {locked(kDevice), locked(kHost)};
    for (const auto& [path, cells] : model_)
      for (const std::uint32_t tier : {kDevice, kHost}) {
        const PageCell& at = cells[tier];
        if (at.presence == Presence::absent) continue;
        const bool present = at.presence == Presence::present;
        expect(present || tier == kHost, "nothing is in flight to the device");
        expect((present ? owned[tier] : coming).insert(at.id).second, "a page has one place");
        expect(pool(tier).owner(at.id) == std::string(present ? "cached" : "private"), "a page of the tree is its own");
        if (present) expect(content(tier, at.id) == path, "a page holds the symbols that lead to it");
        if (present) locked_pages[tier] += locked_paths[tier].contains(path);
      }
    for (const std::uint32_t tier : {kDevice, kHost}) {
      expect_equal(pool(tier).owned(Owner::cached), owned[tier].size(), "cached pages");
      const CellCounts counts = tree_.counts(0, tier);
      expect_equal(counts.present, owned[tier].size(), "pages that the tree counts");
      expect_equal(counts.in_flight, tier == kHost ? coming.size() : 0, "pages in flight");
      expect_equal(counts.locked, locked_pages[tier], "pages locked");
    }
    compare_copies(coming);
    expect_equal(host_.owned(Owner::privately), coming.size(), "private host pages");
    std::uint64_t privately = 0;
    for (const Holder& h : open_) {
      privately += compare_lease(*this, h, model_, pool_, &owned[kDevice]);
      expect_equal(h.lease->loadable(), h.loadable, "positions that can be loaded");
      const std::uint64_t upto = h.load ? h.published : std::min(h.reserved, h.lease->length());
      expect_equal(h.lease->publishable(), upto, "positions that may be published");
    }
    for (const Left& left : left_)
      privately += left.pages;
    expect_equal(pool_.owned(Owner::privately), privately, "private pages");
    expect_equal(cache_.counters.open, open_.size() + left_.size(), "leases that are open, or left pages");
    expect_equal(cache_.counters.queried, queried_, "positions queried");
    expect_equal(cache_.counters.hit, hit_, "positions hit");
    expect_equal(cache_.counters.host_hit, host_hit_, "positions hit on the host");
  }
  void compare_copies(std::set<std::int32_t> coming) const {
    for (const Copy& copy : copies_)
      for (const Copy::Part& part : copy.parts)
        for (std::size_t i = 0; i < part.targets.size(); ++i) {
          expect_equal(coming.erase(part.targets[i]), 1, "the target of a copy is in flight");
          const Path here = front(part.path, pages(part.path) - part.targets.size() + i + 1);
          expect(cell(here, kHost) == PageCell{Presence::in_flight, part.targets[i]}, "a page in flight has its place");
        }
    expect(coming.empty(), "every page in flight is being copied");
  }
  std::set<Path> locked(std::uint32_t tier) const {
    std::set<Path> ends;
    for (const Holder& h : open_)
      if (h.lease && !h.lease->closed()) ends.insert(tier == kDevice ? shared(h) : h.host);
    for (const Left& left : left_)
      ends.insert(tier == kDevice ? left.device : left.host);
    for (const Copy& copy : copies_)
      for (const Copy::Part& part : copy.parts)
        ends.insert(part.path);
    for (const Path& path : held_)
      ends.insert(path);
    std::set<Path> all;
    for (const Path& end : ends)
      for (std::uint64_t n = 1; n <= pages(end); ++n)
        all.insert(front(end, n));
    return all;
  }
  std::uint64_t evictable() const {
    const std::set<Path> locked_paths = locked(kDevice);
    return static_cast<std::uint64_t>(std::count_if(model_.begin(), model_.end(), [&](const auto& page) {
      return page.second[kDevice].presence == Presence::present && !locked_paths.contains(page.first);
    }));
  }

  // The pages that the tree freed were its own, and nobody held them.
  void gone(const Ids& ids, std::uint32_t tier) {
    const std::set<Path> held = locked(tier);
    for (const std::int32_t id : ids) {
      const auto at =
          std::find_if(model_.begin(), model_.end(), [&](const auto& p) { return p.second[tier].id == id; });
      expect(at != model_.end() && has(at->first, tier), "an evicted page was present in the tree");
      expect(!held.contains(at->first), "an evicted page was not locked");
      put(Path(at->first), tier, {});
    }
  }
  // The same after the cache has evicted by itself: the pages that the tree no longer has.
  void evicted_since(const std::set<Path>& held) {
    const Contents contents = contents_of(tree_, kRows, kTiers);
    for (const auto& [path, cells] : Contents(model_)) {
      const auto at = contents.find(path);
      if (!has(path, kDevice) || (at != contents.end() && at->second[kDevice] == cells[kDevice])) continue;
      expect(!held.contains(path), "an evicted page was not locked");
      put(path, kDevice, {});
    }
  }

  // Most calls of the cache end dropped leases, except while their pages are being written.
  void taken_back() {
    std::erase_if(left_, [](const Left& left) { return !left.load; });
  }
  void take_back() {
    cache_.end_abandoned();
    taken_back();
  }

  // Calls a function that needs `missing` more pages. Returns whether they are available; else it throws and changes
  // nothing.
  bool try_room(std::uint64_t missing, const std::function<void()>& call) {
    const std::uint64_t free = pool_.owned(Owner::free);
    std::uint64_t returning = 0;
    for (const Left& left : left_)
      returning += left.load ? 0 : left.pages;
    taken_back();
    const std::set<Path> held = locked(kDevice);
    const std::uint64_t spare = evictable();
    if (missing <= free + returning + spare) {
      call();
      evicted_since(held);
      return true;
    }
    const NoPages error = thrown<NoPages>("more pages than available", call);
    expect_equal(error.needed, missing, "pages needed");
    expect_equal(error.free, free + returning, "pages free");
    expect_equal(error.evictable, spare, "pages that could be evicted");
    expect_equal(error.total, shape_.pages, "pages in all");
    return false;
  }

  // The operation touched the nodes that end these paths, if they still exist.
  void expect_touched(const std::vector<Path>& paths) {
    const std::vector<Handle> touched = cache_.take_touched();
    expect_equal(touched.size(), paths.size(), "nodes touched");
    for (std::size_t i = 0; i < paths.size(); ++i) {
      try {
        expect(tree_.path_key(touched[i]) == paths[i], "a node that was touched");
      } catch (const StaleHandle&) {
      }
      wanted_.push_back(touched[i]);
    }
    while (wanted_.size() > 6)
      wanted_.erase(wanted_.begin());
  }

  // ---------------------------------------------------------------- leases

  void open() {
    if (choose_.one_in(3)) evict(100, kDevice);  // otherwise there is rarely anything to load
    doing_ = "open";
    Holder h;
    std::tie(h.ns, h.key) = some_path();
    const std::uint64_t length = h.key.size() / kSymbolBytes;
    const std::uint64_t limit = length == 0 ? 0 : length - choose_.below(2);
    std::uint64_t found = 0;
    for (; (found + 1) * page_size <= limit; ++found) {
      const Path next = front(h, found + 1);
      if (!has(next, kDevice) && !has(next, kHost)) break;
      if (h.hit == found * page_size && has(next, kDevice)) h.hit += page_size;
    }
    h.published = h.reserved = h.hit;
    h.loadable = found * page_size - h.hit;
    if (h.loadable) h.host = front(h, found);
    const Bytes key = bytes_of(h.key);
    const PeekResult peeked = tree_.peek(h.ns, key.first(limit * kSymbolBytes), false);
    expect_equal(peeked.pages * page_size, h.hit, "positions peeked");
    expect_equal(peeked.host_pages * page_size, h.loadable, "positions peeked on the host");
    h.lease = std::make_unique<Lease>(cache_, h.ns, choose_.below(3), key, limit, choose_.one_in(2), CheckRest());
    taken_back();
    expect_touched(found ? std::vector<Path>{front(h, found)} : std::vector<Path>{});
    open_.push_back(std::move(h));
    if (choose_.one_in(2) || open_.back().loadable) begin_load(open_.back());
    if (choose_.one_in(2)) reserve(open_.back());
  }

  // Mostly a path that was published before, so that prefixes that only the host has are used again.
  Path some_path() {
    if (!known_.empty() && !choose_.one_in(4)) {
      Path path = choose_.of(known_);
      if (choose_.one_in(2)) path.second += some_key(choose_, kSymbolBytes, page_size, 3);
      return path;
    }
    return {choose_.one_in(4) ? "a" : "", some_key(choose_, kSymbolBytes, page_size, 7)};
  }

  void use(Holder& h) {
    if (h.load && choose_.one_in(3)) return end_load(h);
    switch (choose_.below(9)) {
      case 0:
      case 1:
        return reserve(h);
      case 2:
      case 3:
      case 4:
        return publish(h);
      case 5:
        return append(h);
      case 6:
        return choose_.one_in(2) ? begin_load(h) : copy_inside(h);
      case 7:
        return close(h);
      default:
        if (choose_.one_in(2)) drop(h);
    }
  }

  void reserve(Holder& h) {
    doing_ = "reserve";
    const std::uint64_t length = h.key.size() / kSymbolBytes;
    std::uint64_t n = choose_.below(3 * page_size + 2);
    if (length > h.reserved && choose_.one_in(2)) n = length - h.reserved;
    const std::uint64_t missing = pages(h.reserved + n) - pages(h.reserved);
    if (missing <= pool_.owned(Owner::free))
      h.lease->reserve(n);
    else if (!try_room(missing, [&] { h.lease->reserve(n); }))
      return;
    h.reserved += n;
    if (!h.counted) {
      queried_ += length;
      hit_ += h.hit;
    }
    h.counted = true;
  }

  // Copies a page that agrees in its front with the key. random_cache checks this in detail.
  void copy_inside(Holder& h) {
    doing_ = "copy the front of a page";
    if (h.hit != h.published || h.reserved != h.hit) return expect(!h.lease->begin_copy(), "too late for a copy");
    take_back();
    const std::set<Path> held = locked(kDevice);
    std::optional<PageCopy> copy;
    try {
      copy = h.lease->begin_copy();
    } catch (const StaleHandle&) {  // it was evicted since the match
    }
    evicted_since(held);
    if (copy) h.lease->end_copy(false);
    if (copy) expect(begins_with(content(kDevice, copy->source), shared(h)), "the front of a page");
  }

  void append(Holder& h) {
    doing_ = "append";
    const std::string more = some_key(choose_, kSymbolBytes, page_size, 2);
    h.lease->append(bytes_of(more));
    h.key += more;
    h.appended = h.appended || !more.empty();
  }

  void publish(Holder& h) {
    doing_ = "publish";
    const std::uint64_t upto = h.lease->publishable();
    const std::uint64_t some = !choose_.one_in(4) ? upto : choose_.below(static_cast<std::uint32_t>(upto) + 1);
    write(h, upto);
    const Ids table = table_of(h);
    h.lease->publish(some);
    published(h, some, table);
  }
  // Writes what this lease computes into its private pages.
  void write(const Holder& h, std::uint64_t upto) {
    for (std::uint64_t page = h.published / page_size; page < upto / page_size; ++page)
      content(kDevice, h.lease->table().memory()[static_cast<std::ptrdiff_t>(page)]) = front(h, page + 1);
  }
  static Ids table_of(const Holder& h) {
    const IdSpan ids = h.lease->table().from(0);
    return {ids.begin(), ids.end()};
  }
  // The pages of this table up to a position are now the tree's, unless it has its own.
  void published(Holder& h, std::uint64_t upto, const Ids& table) {
    const std::uint64_t before = h.published / page_size, end = upto / page_size;
    for (std::uint64_t page = before; page < end; ++page)
      if (!has(front(h, page + 1), kDevice)) put(front(h, page + 1), kDevice, {Presence::present, table[page]});
    h.published = std::max(before, end) * page_size;
    if (before < end) known_.push_back(front(h, end));
    if (known_.size() > 4) known_.erase(known_.begin());
    expect_touched(before < end ? std::vector<Path>{front(h, end)} : std::vector<Path>{});
  }

  void begin_load(Holder& h) {
    doing_ = "begin a load";
    const auto begin = [&] {
      PageLoad load = h.lease->begin_load();
      h.load = Load{std::move(load), h.host};
    };
    if (h.load || !h.loadable || h.reserved != h.hit || h.published != h.hit) {
      thrown<BadValue>("a load too late", begin);
      return;
    }
    if (!try_room(h.loadable / page_size, begin)) return;
    const Load& load = *h.load;
    expect(load.page_load.id > last_load_, "a load has a number of its own");
    last_load_ = load.page_load.id;
    h.reserved += h.loadable;
    const std::uint64_t first = h.hit / page_size;
    expect_equal(load.page_load.source[0].size(), h.loadable / page_size, "pages to load");
    for (std::size_t i = 0; i < load.page_load.source[0].size(); ++i) {
      const PageCell there = cell(front(h, first + i + 1), kHost);
      expect(there == PageCell{Presence::present, load.page_load.source[0][i]}, "a page to load from the host");
      expect_equal(load.page_load.target[0][i], h.lease->table().from(first)[i], "a page to load to");
      content(kDevice, load.page_load.target[0][i]) = {};
    }
  }
  // Copies late, so that a page that is not locked as it should be has had time to change.
  void copy_up(const Load& load) {
    for (std::size_t i = 0; i < load.page_load.source[0].size(); ++i)
      content(kDevice, load.page_load.target[0][i]) = content(kHost, load.page_load.source[0][i]);
  }
  void end_load(Holder& h) {
    const bool arrived = !choose_.one_in(3);
    doing_ = arrived ? "a load arrives" : "a load fails";
    if (arrived) copy_up(*h.load);
    const Ids table = table_of(h);
    h.lease->end_load(arrived);
    if (arrived) {
      h.hit += h.loadable;
      host_hit_ += h.loadable;
      if (h.counted) hit_ += h.loadable;
    }
    h.load.reset();
    h.host = {};
    h.loadable = 0;
    published(h, arrived ? h.hit : 0, table);
    h.lease->end_load(!arrived);  // a second time does nothing
  }

  void close(Holder& h) {
    if (!h.lease || h.lease->closed()) return;
    const std::uint32_t way = choose_.below(4);
    doing_ = way ? "finish" : "abort";
    std::uint64_t upto = std::min<std::uint64_t>(h.lease->publishable(), h.key.size() / kSymbolBytes - h.appended);
    if (way == 2) upto = choose_.below(static_cast<std::uint32_t>(upto) + 1);
    write(h, upto);
    const Ids table = table_of(h);
    if (way == 0)
      h.lease->abort();
    else if (way == 1)
      h.lease->finish({});
    else
      h.lease->finish(upto);
    published(h, way ? upto : 0, table);
    if (h.load) leave(h);
    expect(h.lease->closed(), "a lease is closed");
    thrown<Closed>("loading", [&] { h.lease->begin_load(); });
    thrown<Closed>("the end of a load", [&] { h.lease->end_load(true); });
    h.lease->abort();
    h.lease->finish({});
  }
  void drop(Holder& h) {
    doing_ = "drop";
    leave(h);
    h.lease.reset();
  }
  void leave(Holder& h) { left_.push_back({shared(h), h.host, h.load, pages(h.reserved) - h.published / page_size}); }

  // ---------------------------------------------------------------- the controller

  void control() {
    doing_.clear();
    switch (choose_.below(10)) {
      case 0:
      case 1:
      case 2:
        return back_up(wanted());
      case 3:
      case 4:
      case 5:
        return end_some_copy();
      case 6:
        return end_left_load();
      case 7:
        return evict(1 + choose_.below(6), kDevice);
      case 8:
        return evict(1 + choose_.below(3), choose_.one_in(2) ? kHost : kDevice);
      default:
        return take_back();
    }
  }

  std::vector<std::size_t> loads_left() const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < left_.size(); ++i)
      if (left_[i].load) found.push_back(i);
    return found;
  }
  // Ends the copy into the pages of a closed lease: only now may others get them.
  void end_left_load() {
    doing_ = "end the load of a closed lease";
    const std::vector<std::size_t> found = loads_left();
    if (found.empty()) return cache_.end_load(last_load_ + 1), taken_back();
    Left& left = left_[choose_.of(found)];
    if (choose_.one_in(2)) copy_up(*left.load);
    const std::uint64_t load = left.load->page_load.id;
    left.load.reset();
    cache_.end_load(load);
    taken_back();
  }

  void evict(std::uint64_t want, std::uint32_t tier) {
    doing_ = tier == kDevice ? "evict from the device" : "evict from the host";
    evict_now(want, tier);
  }
  void evict_now(std::uint64_t want, std::uint32_t tier) {
    const CellCounts counts = tree_.counts(0, tier);
    const Ids ids = tree_.evict(want, 0, tier)[0];
    expect_equal(ids.size(), std::min<std::uint64_t>(want, counts.present - counts.locked), "pages evicted");
    gone(ids, tier);
    pool(tier).move(ids, Owner::cached, Owner::free);
  }

  // The cache's hook for pages; sometimes frees fewer than requested, so that the cache has to call again.
  void make_room(std::uint64_t want) {
    if (want > 1 && choose_.one_in(3)) want = 1;
    if (shape_.room == Room::by_hook_after_copy) save(tree_.next_victim(0, kDevice));
    evict_now(want, kDevice);
  }
  // Copies the next victim to the host, and waits for that copy and all others.
  void save(Handle victim) {
    held_.push_back(tree_.path_key(victim));
    tree_.lock(victim, kDevice);
    tree_.lock(victim, kHost);
    back_up(victim);
    while (!copies_.empty())
      end_some_copy();
    held_.pop_back();
    tree_.unlock(victim, kDevice);
    tree_.unlock(victim, kHost);
  }

  // A node that was touched, and may be gone by now; or a hot one.
  Handle wanted() {
    if (choose_.one_in(2)) wanted_ = tree_.hottest(kDevice);
    if (wanted_.size() > 8) wanted_.resize(8);
    if (wanted_.empty()) return 0;
    const std::size_t at = choose_.below(static_cast<std::uint32_t>(wanted_.size()));
    const Handle node = wanted_[at];
    wanted_.erase(wanted_.begin() + static_cast<std::ptrdiff_t>(at));
    return node;
  }

  void back_up(Handle node) {
    doing_ += ", back up";
    Copy copy;
    try {
      for (const Handle at : tree_.lacking(node, kDevice, kHost, shape_.hits))
        copy.parts.push_back({at, tree_.path_key(at), tree_.own_ids(at, 0, kDevice), {}});
    } catch (const StaleHandle&) {
      return;
    }
    std::uint64_t needed = 0;
    for (Copy::Part& part : copy.parts) {
      needed += part.sources.size();
      for (const std::uint32_t tier : {kDevice, kHost})
        tree_.lock(part.node, tier);
      held_.push_back(part.path);
    }
    const std::uint64_t free = host_.owned(Owner::free);
    const CellCounts counts = tree_.counts(0, kHost);
    const bool room = needed <= free + counts.present - counts.locked;
    if (room && needed > free) evict_now(needed - free, kHost);
    for (std::size_t i = 0; i < copy.parts.size(); ++i)
      held_.pop_back();
    if (room)
      send(std::move(copy));
    else
      unlock_parts(copy);
  }
  void send(Copy copy) {
    if (copy.parts.empty()) return;
    if (const Handle name = tree_.in_flight_above(copy.parts[0].node, kHost)) copy.above = &copy_named(name);
    for (Copy::Part& part : copy.parts) {
      part.targets.resize(part.sources.size());
      host_.allocate(part.targets.size(), part.targets.data());
      tree_.attach(part.node, 0, kHost, part.targets, false);
      const std::uint64_t first = pages(part.path) - part.sources.size();
      for (std::size_t i = 0; i < part.targets.size(); ++i) {
        const Path here = front(part.path, first + i + 1);
        expect(cell(here, kDevice) == PageCell{Presence::present, part.sources[i]}, "a page to copy");
        put(here, kHost, {Presence::in_flight, part.targets[i]});
        content(kHost, part.targets[i]) = {};
      }
    }
    copies_.push_back(std::move(copy));
  }
  const Copy& copy_named(Handle name) const {
    for (const Copy& copy : copies_)
      for (const Copy::Part& part : copy.parts)
        if (part.node == name) return copy;
    throw Failure{"the transfer above is one of the copies"};
  }
  void unlock_parts(const Copy& copy) {
    for (const Copy::Part& part : copy.parts)
      for (const std::uint32_t tier : {kDevice, kHost})
        tree_.unlock(part.node, tier);
  }

  // Completes any copy whose parents are complete; or fails any copy together with all copies below it.
  void end_some_copy() {
    doing_ += ", end a copy";
    if (copies_.empty()) return;
    auto at = copies_.begin();
    std::advance(at, choose_.below(static_cast<std::uint32_t>(copies_.size())));
    if (choose_.one_in(4)) return fail(*at);
    while (at->above)
      at = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& copy) { return &copy == at->above; });
    arrive(*at);
  }
  void arrive(const Copy& copy) {
    for (const Copy::Part& part : copy.parts) {
      tree_.commit(part.node, kHost);
      host_.move(part.targets, Owner::privately, Owner::cached);
      const std::uint64_t first = pages(part.path) - part.targets.size();
      for (std::size_t i = 0; i < part.targets.size(); ++i) {
        content(kHost, part.targets[i]) = content(kDevice, part.sources[i]);
        put(front(part.path, first + i + 1), kHost, {Presence::present, part.targets[i]});
      }
    }
    for (Copy& below : copies_)
      if (below.above == &copy) below.above = nullptr;
    end(copy);
  }
  void fail(const Copy& copy) {
    for (;;) {
      const auto below = [&](const Copy& other) { return other.above == &copy; };
      const auto child = std::find_if(copies_.begin(), copies_.end(), below);
      if (child == copies_.end()) break;
      fail(*child);
    }
    for (auto part = copy.parts.rbegin(); part != copy.parts.rend(); ++part) {
      const std::vector<Ids> ids = tree_.cancel(part->node, kHost);
      expect(ids[0] == part->targets, "cancelled pages are returned");
      host_.move(ids[0], Owner::privately, Owner::free);
      for (std::size_t i = 0; i < ids[0].size(); ++i)
        put(front(part->path, pages(part->path) - i), kHost, {});
    }
    end(copy);
  }
  void end(const Copy& copy) {
    const Copy ended = copy;
    copies_.remove_if([&](const Copy& other) { return &other == &copy; });
    unlock_parts(ended);
  }

  Choices choose_;
  const Shape shape_;
  Tree tree_;
  Pool pool_, host_;
  Cache cache_;
  Contents model_;
  std::vector<Path> written_[kTiers];  // the content of each page
  std::vector<Holder> open_;
  std::vector<Left> left_;
  std::list<Copy> copies_;
  std::vector<Path> held_;   // locked on both tiers by an operation under way
  std::vector<Path> known_;  // the last published paths
  std::vector<Handle> wanted_;
  std::uint64_t last_load_ = 0, queried_ = 0, hit_ = 0, host_hit_ = 0;
  std::string doing_;
};

}  // namespace

void random_tiers(std::uint64_t seed, std::uint32_t operations) {
  Choices choose(seed);
  std::vector<Shape> shapes;
  for (const Policy& policy : kPolicies)
    if (policy.rank)
      shapes.push_back({choose.of<std::uint32_t>({1, 2, 4}), choose.of<std::uint32_t>({10, 20, 40}),
                        choose.of<std::uint32_t>({8, 20, 60}), choose.one_in(5) ? 1u : 0u,
                        choose.of<Room>({Room::by_order, Room::by_hook, Room::by_hook_after_copy}),
                        std::string(policy.name)});
  for (const Shape& shape : shapes) {
    TiersWorld world(shape, seed);
    drive(world,
          "tiers, " + shape.policy + ", page " + std::to_string(shape.page_size) + ", " + std::to_string(shape.pages) +
              " and " + std::to_string(shape.host_pages) + " pages, room " +
              std::to_string(static_cast<int>(shape.room)),
          seed, operations);
  }
}

}  // namespace mainstem
