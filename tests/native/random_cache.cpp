// Random operations on a cache: several open leases, duplicates, a small pool, dropped leases. After each operation all
// pages are counted: every page is free, the tree's, or one lease's; and every page that a table or the tree names
// holds exactly the symbols that lead to it.
#include <algorithm>
#include <memory>
#include <optional>
#include <set>

#include "random_operations.h"
#include "worlds.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kSymbolBytes = 4;
const std::vector<Component> kRows{{Kind::full}};

struct Shape {
  std::uint32_t page_size, pages;
  bool enabled, hook;
  std::string policy;
};

// A lease, and its expected properties.
struct Holder {
  std::unique_ptr<Lease> lease;
  std::string ns, key;
  std::uint64_t hit, reserved, published;
  bool appended = false;
};

class CacheWorld : Paging {
 public:
  CacheWorld(const Shape& shape, std::uint64_t seed)
      : Paging{kSymbolBytes, shape.page_size},
        choose_(seed),
        shape_(shape),
        tree_(kSymbolBytes, shape.page_size, kRows, 1, shape.policy, seed),
        pool_(shape.pages),
        cache_(tree_, pool_, shape.enabled),
        written_(shape.pages) {
    if (shape.hook) cache_.evict = [this](std::uint32_t, std::uint64_t pages, std::string_view) { evict(pages); };
  }

  void step() {
    if (open_.empty() || choose_.one_in(5))
      open();
    else
      use(open_[choose_.below(static_cast<std::uint32_t>(open_.size()))]);
    if (open_.size() > 5) close(open_.front());
    std::erase_if(open_, [](const Holder& holder) { return holder.lease == nullptr || holder.lease->closed(); });
    compare();
  }

  void finish() {
    while (!open_.empty()) {
      close(open_.back());
      open_.pop_back();
    }
    cache_.end_abandoned();
    collected();
    compare();
    expect_equal(pool_.owned(Owner::privately), 0, "private pages left");
    expect_equal(cache_.counters.open, 0, "open leases left");
    while (pool_.owned(Owner::cached))
      evict(shape_.pages);
    expect_equal(pool_.owned(Owner::free), shape_.pages, "free pages in the end");
    expect_equal(tree_.size(), 0, "nodes left");
  }

 private:
  void evict(std::uint64_t pages) {
    // Sometimes evicts fewer than requested: the cache has to call again.
    if (pages > 1 && choose_.one_in(3)) pages = 1;
    pool_.move(tree_.evict(pages, 0, 0)[0], Owner::cached, Owner::free);
  }

  // ---------------------------------------------------------------- invariants

  void compare() const {
    tree_.check();
    expect(pool_.sound(), "the pool is sound");
    const Contents held = contents_of(tree_, kRows, 1);
    std::set<std::int32_t> owned;
    for (const auto& [path, cells] : held) {
      expect(cells[0].presence == Presence::present, "a cached page is present");
      const std::int32_t page = cells[0].id;
      expect(owned.insert(page).second && pool_.owner(page) == std::string("cached"), "a cached page is the tree's");
      expect(written_[static_cast<std::size_t>(page)] == path, "a cached page holds the symbols that lead to it");
    }
    expect_equal(pool_.owned(Owner::cached), held.size(), "cached pages");
    expect_equal(tree_.counts(0, 0).present, held.size(), "pages that the tree counts");
    for (const Holder& holder : open_)
      compare_lease(*this, holder, held, pool_, &owned);
    expect_equal(pool_.owned(Owner::privately), owned.size() - held.size() + dropped_, "private pages");
    expect_equal(pool_.owned(Owner::free), shape_.pages - owned.size() - dropped_, "free pages");
    expect_equal(tree_.counts(0, 0).locked, locked(), "pages locked");
  }
  std::uint64_t locked() const {
    std::set<Path> paths;
    for (const Holder& holder : open_)
      for (std::uint64_t page = 0; page < holder.published / page_size; ++page)
        paths.insert(front(holder, page + 1));
    paths.insert(left_.begin(), left_.end());
    return paths.size();
  }

  // ---------------------------------------------------------------- operations

  void open() {
    const std::string ns = choose_.one_in(4) ? "a" : "";
    const std::string key = some_key(choose_, kSymbolBytes, page_size, 7);
    const std::uint64_t length = key.size() / kSymbolBytes;
    const std::uint64_t limit = length == 0 ? 0 : length - choose_.below(2);
    const bool inside = choose_.one_in(2);
    const Contents held = contents_of(tree_, kRows, 1);
    Holder h{nullptr, ns, key, 0, 0, 0};
    while (shape_.enabled && (h.hit + page_size) <= limit && held.contains(front(h, h.hit / page_size + 1)))
      h.hit += page_size;
    h.published = h.hit;
    std::uint64_t known = ~std::uint64_t{0};
    h.lease = std::make_unique<Lease>(cache_, ns, choose_.below(3), bytes_of(key), limit, inside,
                                      [&](std::size_t symbols) { known = symbols; });
    collected();
    expect_equal(known, h.hit, "the symbols known to the tree");
    const std::string_view rest = std::string_view(key).substr(0, limit * kSymbolBytes).substr(h.hit * kSymbolBytes);
    const std::uint64_t agreeing = inside ? agreement(*this, held, front(h, h.hit / page_size), rest) : 0;
    const std::uint64_t missed = cache_.counters.partial_missed;
    const std::optional<PageCopy> copy = h.lease->begin_copy();
    if (copy) {
      expect_equal(copy->positions, agreeing, "positions to copy");
      const Path source = written_[static_cast<std::size_t>(copy->source)];
      expect(begins_with(source, {ns, key.substr(0, h.hit * kSymbolBytes + agreeing * kSymbolBytes)}),
             "the front of a page");
      const bool copied = !choose_.one_in(3);
      h.lease->end_copy(copied);
      if (copied) h.hit += agreeing;
    } else if (agreeing) {
      expect_equal(cache_.counters.partial_missed, missed + 1, "copies missed");
      expect_equal(pool_.owned(Owner::free), 0, "free pages if a copy found none");
    }
    h.reserved = h.hit;
    open_.push_back(std::move(h));
  }
  void use(Holder& h) {
    switch (choose_.below(8)) {
      case 0:
      case 1:
      case 2:
        reserve(h);
        break;
      case 3:
      case 4:
        publish(h);
        break;
      case 5:
        append(h);
        break;
      case 6:
        close(h);
        break;
      default:
        if (choose_.one_in(2)) drop(h);
    }
  }

  void reserve(Holder& h) {
    const std::uint64_t length = h.key.size() / kSymbolBytes;
    std::uint64_t n = choose_.below(3 * page_size + 2);
    if (length > h.reserved && choose_.one_in(2)) n = length - h.reserved;
    const std::uint64_t table = pages(h.reserved);
    const std::uint64_t missing = pages(h.reserved + n) - table;
    const std::uint64_t free = pool_.owned(Owner::free);
    if (missing > free) collected_soon();
    const std::uint64_t evictable = tree_.counts(0, 0).present - locked();
    if (missing > pool_.owned(Owner::free) + returning_ + evictable) {
      const Contents held = contents_of(tree_, kRows, 1);
      const NoPages error = thrown<NoPages>("more pages than available", [&] { h.lease->reserve(n); });
      collected();
      expect_equal(error.needed, missing, "pages needed");
      expect_equal(error.free, pool_.owned(Owner::free), "pages free");
      expect_equal(error.evictable, evictable, "pages that could be evicted");
      expect_equal(error.total, shape_.pages, "pages in all");
      expect(contents_of(tree_, kRows, 1) == held, "a lease that finds no pages evicts none");
      return;
    }
    h.lease->reserve(n);
    if (missing > free) collected();
    h.reserved += n;
  }

  // Writes what this lease computes into its private pages, then publishes some of it.
  void publish(Holder& h) {
    const std::uint64_t upto = std::min<std::uint64_t>(h.reserved, h.key.size() / kSymbolBytes);
    const std::uint64_t some = choose_.one_in(2) ? upto : choose_.below(static_cast<std::uint32_t>(upto) + 1);
    write(h, upto);
    expect_equal(h.lease->publishable(), upto, "positions that may be published");
    h.lease->publish(some);
    note_published(h, some);
  }
  void write(const Holder& h, std::uint64_t upto) {
    for (std::uint64_t page = h.published / page_size; page < upto / page_size; ++page)
      written_[static_cast<std::size_t>(h.lease->table().memory()[static_cast<std::ptrdiff_t>(page)])] =
          front(h, page + 1);
  }
  void note_published(Holder& h, std::uint64_t upto) const {
    if (shape_.enabled) h.published = std::max(h.published, upto / page_size * page_size);
  }

  void append(Holder& h) {
    const std::string more = some_key(choose_, kSymbolBytes, page_size, 2);
    h.lease->append(bytes_of(more));
    h.key += more;
    h.appended = h.appended || !more.empty();
  }

  void close(Holder& h) {
    std::uint64_t upto = std::min<std::uint64_t>(h.reserved, h.key.size() / kSymbolBytes - h.appended);
    switch (choose_.below(3)) {
      case 0:
        h.lease->abort();
        break;
      case 1:
        write(h, upto);
        h.lease->finish({});
        break;
      default:
        upto = choose_.below(static_cast<std::uint32_t>(upto) + 1);
        write(h, upto);
        h.lease->finish(upto);
    }
    refuse(*h.lease);
  }
  // A closed lease throws Closed; closing it again does nothing.
  void refuse(Lease& lease) const {
    expect(lease.closed(), "a lease is closed");
    thrown<Closed>("reserving", [&] { lease.reserve(1); });
    thrown<Closed>("appending", [&] { lease.append({}); });
    thrown<Closed>("publishing", [&] { lease.publish(0); });
    thrown<Closed>("reading the table", [&] { lease.table(); });
    lease.abort();
    lease.finish({});
  }

  // The cache's next call frees the pages and the lock of a dropped lease.
  void drop(Holder& h) {
    const std::uint64_t privately = pages(h.reserved) - h.published / page_size;
    h.lease.reset();
    dropped_ += privately;
    for (std::uint64_t page = 0; page < h.published / page_size; ++page)
      left_.insert(front(h, page + 1));
  }
  // The pages that reserve() will find in the pool before it evicts anything.
  void collected_soon() {
    returning_ = dropped_;
    left_.clear();
  }
  void collected() {
    dropped_ = returning_ = 0;
    left_.clear();
  }

  Choices choose_;
  const Shape shape_;
  Tree tree_;
  Pool pool_;
  Cache cache_;
  std::vector<Holder> open_;
  std::vector<Path> written_;  // the content of each page
  std::uint64_t dropped_ = 0, returning_ = 0;
  std::set<Path> left_;  // pages that dropped leases still lock
};

}  // namespace

void random_cache(std::uint64_t seed, std::uint32_t operations) {
  Choices choose(seed);
  std::vector<Shape> shapes;
  for (const Policy& policy : kPolicies)
    if (policy.rank)
      shapes.push_back({choose.of<std::uint32_t>({1, 2, 4}), choose.of<std::uint32_t>({12, 24, 60}), !choose.one_in(7),
                        choose.one_in(2), std::string(policy.name)});
  for (const Shape& shape : shapes) {
    CacheWorld world(shape, seed);
    drive(world,
          "cache, " + shape.policy + ", page " + std::to_string(shape.page_size) + ", " + std::to_string(shape.pages) +
              " pages",
          seed, operations);
  }
}

}  // namespace mainstem
