// Fails every allocation of every operation, one after another. Afterwards the tree must be sound and hold the same
// pages under the same prefixes, each page must have the owner that it had, and the same call must succeed once there
// is memory. Prints a line an operation.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>

#include "cache.h"
#include "support.h"

namespace {

long allocations_left = -1;  // below 0: none fails

bool fails_now() {
  return allocations_left >= 0 && allocations_left-- == 0;
}

}  // namespace

// The linker sends the core's calls of malloc here (--wrap=malloc).
extern "C" void* __real_malloc(std::size_t bytes);
extern "C" void* __wrap_malloc(std::size_t bytes) {
  return fails_now() ? nullptr : __real_malloc(bytes);
}

// Not inlined, or the compiler takes free() for the wrong partner of new.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* memory = fails_now() ? nullptr : __real_malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace mainstem {

namespace {

// Symbols first, first + 1, ...
std::string run_of(std::uint32_t length, std::uint32_t first = 0) {
  std::string key;
  for (std::uint32_t i = 0; i < length; ++i)
    key += symbol(first + i, 4);
  return key;
}

// The same with one symbol changed, so that it parts there.
std::string parted(std::uint32_t length, std::uint32_t at) {
  return run_of(at) + symbol(99999, 4) + run_of(length - at - 1, at + 1);
}

// ---------------------------------------------------------------- the tree

struct Forest {
  explicit Forest(const std::vector<Component>& rows) : rows(rows), tree(4, 1, rows, 2, "lru", 42) {
    node = insert("a", run_of(300));
    for (std::uint32_t i = 0; i < 6; ++i)
      insert("b", run_of(20 + 10 * i, 1000 * i));
    pinned = insert("c", run_of(40));
    tree.lock(pinned, 0);  // keeps it and the next piece apart
    insert("c", run_of(40, 40), pinned);
  }

  Handle insert(const char* ns, const std::string& key, Handle after = 0, bool ready = true, std::uint32_t tier = 0) {
    std::vector<Ids> ids;
    for (const Component& row : rows) {
      Ids& column = ids.emplace_back(row.per_page() ? key.size() / 4 : 1);
      std::iota(column.begin(), column.end(), next_id);
      next_id += static_cast<std::int32_t>(column.size());
    }
    std::vector<IdSpan> spans(ids.begin(), ids.end());
    return tree.insert(ns, after, {bytes_of(key), spans}, 0, tier, ready).node;
  }

  std::vector<Component> rows;
  Tree tree;
  Handle node = 0, pinned = 0;
  std::int32_t next_id = 0;
};

struct Operation {
  const char* name;
  std::function<void(Forest&)> prepare;  // with all the memory that it wants
  std::function<void(Forest&)> run;
};

void nothing(Forest&) {}

// Evicts; what is gone must have been given back.
void evict(Forest& f, std::uint64_t ids, std::uint32_t component) {
  const std::uint64_t before = f.tree.counts(component, 0).present;
  const std::vector<Ids> freed = f.tree.evict(ids, component, 0);
  if (before - f.tree.counts(component, 0).present != freed[component].size()) throw Failure{"ids were lost"};
}

// Host pages in flight for one component of a node; for all that the host lacks of a path.
void attach(Forest& f, Handle node, std::uint32_t component) {
  Ids ids(f.rows[component].ids(f.tree.end(node) - f.tree.start(node)));
  std::iota(ids.begin(), ids.end(), f.next_id);
  f.tree.attach(node, component, 1, ids, false);
  f.next_id += static_cast<std::int32_t>(ids.size());
}
void attach_all(Forest& f, Handle end) {
  for (const Handle node : f.tree.lacking(end, 0, 1, 0))
    for (std::uint32_t component = 0; component < f.rows.size(); ++component)
      if (f.tree.residency(node, component, 1) == Residency::absent) attach(f, node, component);
}

const std::vector<Operation> kOperations{
    {"insert into a new namespace", nothing, [](Forest& f) { f.insert("a tenant with a long name", run_of(100)); }},
    {"insert a branch", nothing, [](Forest& f) { f.insert("a", parted(300, 150)); }},
    {"extend", nothing, [](Forest& f) { f.insert("a", run_of(100, 300), f.node); }},
    {"extend in flight", nothing, [](Forest& f) { f.insert("a", run_of(100, 300), f.node, false); }},
    {"extend in flight from the root", nothing, [](Forest& f) { f.insert("a", run_of(400), 0, false); }},
    {"fill another tier", nothing, [](Forest& f) { f.insert("a", run_of(200), 0, true, 1); }},
    {"match with a split", nothing, [](Forest& f) { f.tree.match("a", bytes_of(run_of(120)), true); }},
    {"match on two tiers", [](Forest& f) { f.insert("a", run_of(350), 0, true, 1); },
     [](Forest& f) { f.tree.match("a", bytes_of(run_of(320)), true); }},
    {"views", nothing,
     [](Forest& f) {
       for (const std::string& ns : f.tree.namespaces())
         f.tree.nodes(ns);
     }},
    {"peek", nothing, [](Forest& f) { f.tree.peek("a", bytes_of(run_of(120)), true); }},
    {"lock", nothing, [](Forest& f) { f.tree.lock(f.node, 0); }},
    {"move a lock", [](Forest& f) { f.node = f.insert("c", run_of(50, 40), f.pinned); },
     [](Forest& f) { f.tree.move_lock(f.pinned, f.node, 0); }},
    {"unlock with a joint", nothing, [](Forest& f) { f.tree.unlock(f.pinned, 0); }},
    {"attach", nothing,
     [](Forest& f) {
       const Ids ids(300, 5000);
       f.tree.attach(f.node, 0, 1, ids, true);
     }},
    {"attach in flight", nothing,
     [](Forest& f) {
       const Ids ids(300, 5000);
       f.tree.attach(f.node, 0, 1, ids, false);
     }},
    {"commit", [](Forest& f) { f.node = f.insert("a", run_of(100, 300), f.node, false); },
     [](Forest& f) { f.tree.commit(f.node, 0); }},
    {"cancel", [](Forest& f) { f.node = f.insert("a", run_of(100, 300), f.node, false); },
     [](Forest& f) { f.tree.cancel(f.node, 0); }},
    {"attach in flight below what is in flight",
     [](Forest& f) {
       attach_all(f, f.pinned);
       f.node = f.tree.match("c", bytes_of(run_of(80)), false).node;
     },
     [](Forest& f) { attach(f, f.node, 0); }},
    {"commit on two tiers", [](Forest& f) { attach_all(f, f.node); }, [](Forest& f) { f.tree.commit(f.node, 1); }},
    {"commit with a joint",
     [](Forest& f) {
       attach_all(f, f.pinned);
       f.node = f.tree.match("c", bytes_of(run_of(80)), false).node;
       attach_all(f, f.node);
       f.tree.commit(f.pinned, 1);
       f.tree.unlock(f.pinned, 0);
     },
     [](Forest& f) { f.tree.commit(f.node, 1); }},
    {"cancel on two tiers", [](Forest& f) { attach_all(f, f.node); }, [](Forest& f) { f.tree.cancel(f.node, 1); }},
    {"locate with a split", nothing, [](Forest& f) { f.tree.locate("a", bytes_of(run_of(300)), 120); }},
    {"look for what is lacking", nothing,
     [](Forest& f) {
       for (const Handle node : f.tree.lacking(f.node, 0, 1, 0))
         f.tree.own_ids(node, 0, 0);
     }},
    {"look for the hottest", nothing,
     [](Forest& f) {
       for (const Handle node : f.tree.hottest(10, 0))
         f.tree.path_key(node);
     }},
    {"evict everything", nothing, [](Forest& f) { evict(f, 100000, 0); }},
    {"evict a part", nothing, [](Forest& f) { evict(f, 10, 0); }},
    {"evict some of the last component", nothing,
     [](Forest& f) { evict(f, 10, static_cast<std::uint32_t>(f.rows.size() - 1)); }},
    {"evict most of a node", [](Forest& f) { f.tree.match("b", bytes_of(run_of(20)), false); },
     [](Forest& f) { evict(f, 200, 0); }},
    {"evict from a shared node", [](Forest& f) { f.insert("a", run_of(300), 0, true, 1); },
     [](Forest& f) { evict(f, 10, 0); }},
};

// What is refused needs memory for its message.
const std::vector<Operation> kRefusals{
    {"settings", nothing, [](Forest&) { Tree(3, 1, {{Kind::full}}, 1, "lru", 1); }},
    {"a policy", nothing, [](Forest&) { Tree(4, 1, {{Kind::full}}, 1, "a policy that nobody knows", 1); }},
    {"a tier", nothing, [](Forest& f) { f.tree.lock(f.node, 12); }},
    {"a component", nothing, [](Forest& f) { f.tree.counts(12, 0); }},
    {"an insertion behind a node in flight", [](Forest& f) { f.node = f.insert("a", run_of(100, 300), f.node, false); },
     [](Forest& f) { f.insert("a", run_of(10, 400), f.node); }},
    {"an insertion behind a node without pages", nothing,
     [](Forest& f) { f.insert("a", run_of(10, 300), f.node, true, 1); }},
    {"a key and ids", nothing,
     [](Forest& f) {
       const std::vector<Ids> ids(f.rows.size(), Ids(7, 0));
       const std::vector<IdSpan> spans(ids.begin(), ids.end());
       f.tree.insert("a", 0, {bytes_of(run_of(300)), spans}, 0, 0, true);
     }},
    {"a negative id", nothing,
     [](Forest& f) {
       const std::vector<Ids> ids(f.rows.size(), Ids(1, -5));
       const std::vector<IdSpan> spans(ids.begin(), ids.end());
       f.tree.insert("a", 0, {bytes_of(run_of(1)), spans}, 0, 0, true);
     }},
    {"an attachment of too few", nothing, [](Forest& f) { f.tree.attach(f.node, 0, 1, {}, true); }},
    {"an attachment twice", nothing,
     [](Forest& f) {
       const Ids ids(300, 5000);
       f.tree.attach(f.node, 0, 0, ids, true);
     }},
    {"a commit", nothing, [](Forest& f) { f.tree.commit(f.node, 0); }},
    {"a cancellation", nothing, [](Forest& f) { f.tree.cancel(f.node, 0); }},
    {"a rank", nothing, [](Forest& f) { f.tree.rank(f.pinned, 0, 0, {1, 0}); }},
    {"a pool", nothing,
     [](Forest&) {
       Pool pool(4);
       const Ids wrong{0, 1, 2};
       pool.move(wrong, Owner::privately, Owner::free);
     }},
    {"a page named twice", nothing,
     [](Forest&) {
       Pool pool(4);
       Ids pages(2);
       pool.allocate(2, pages.data());
       pages[1] = pages[0];
       pool.move(pages, Owner::privately, Owner::free);
     }},
    {"a page", nothing, [](Forest&) { Pool(4).owner(1000000000); }},
};

// Attaching gives every page the same id, which check() would find; these tests look at ids elsewhere.
bool repeats_ids(const Operation& operation) {
  return std::string_view(operation.name).starts_with("attach");
}

// What a forest holds before an operation: the same each time.
Contents prepared(const Operation& operation, const std::vector<Component>& rows) {
  Forest forest(rows);
  operation.prepare(forest);
  return contents_of(forest.tree, rows, 2);
}

// Whether a refusal had as many allocations as that.
bool fail_in_refusal(const Operation& refusal, const std::vector<Component>& rows, const Contents& before, long k) {
  Forest forest(rows);
  refusal.prepare(forest);
  bool refused = false;
  allocations_left = k;
  try {
    refusal.run(forest);
  } catch (const std::bad_alloc&) {
  } catch (const BadValue&) {
    refused = true;
  } catch (const WrongOwner&) {
    refused = true;
  }
  const bool fired = allocations_left < 0;
  allocations_left = -1;
  expect(refused || fired, "it is refused");
  forest.tree.check();
  expect(contents_of(forest.tree, rows, 2) == before, "the contents are the same");
  return fired;
}

// Runs something with its k-th allocation failing. An operation may do without that memory.
enum class End { had_fewer, did_without, failed };

End fail(long k, const std::function<void()>& run) {
  allocations_left = k;
  try {
    run();
  } catch (const std::bad_alloc&) {
    allocations_left = -1;
    return End::failed;
  }
  const bool fired = allocations_left < 0;
  allocations_left = -1;
  return fired ? End::did_without : End::had_fewer;
}

// Whether the operation had as many allocations as that.
bool fail_in_tree(const Operation& operation, const std::vector<Component>& rows, const Contents& before, long k) {
  Forest forest(rows);
  operation.prepare(forest);
  const std::int32_t next_id = forest.next_id;
  const End end = fail(k, [&] { operation.run(forest); });
  if (end != End::failed) {
    if (!repeats_ids(operation)) forest.tree.check();
    return end == End::did_without;
  }
  forest.tree.check();
  expect(contents_of(forest.tree, rows, 2) == before, "the contents are the same");
  forest.next_id = next_id;
  operation.run(forest);
  if (!repeats_ids(operation)) forest.tree.check();
  return true;
}

// ---------------------------------------------------------------- the cache

constexpr std::uint32_t kPages = 100;
const std::vector<Component> kFull{{Kind::full}};

struct Desk {
  explicit Desk(std::uint32_t tiers) : tree(4, 2, kFull, tiers, "lru", 42) {
    insert("b", run_of(60, 7000));
    insert("c", run_of(9, 8000));
    insert("c", run_of(9, 9000));
    lease = open("a", run_of(40));
    lease->reserve(40);
  }
  std::unique_ptr<Lease> open(const char* ns, const std::string& key, std::uint32_t most = 1000) {
    return std::make_unique<Lease>(cache, ns, 0, bytes_of(key), std::min<std::uint64_t>(most, key.size() / 4), true,
                                   CheckRest());
  }
  void insert(const char* ns, const std::string& key) {
    const std::unique_ptr<Lease> writer = open(ns, key);
    writer->reserve(key.size() / 4 - writer->hit());
    writer->finish({});
  }
  // Every page is free, the tree's, or of a lease that is open.
  void check() {
    tree.check();
    expect(pool.sound(), "the pool is sound");
    std::uint64_t privately = 0;
    for (Lease* one : {lease.get(), other.get()})
      if (one && !one->closed()) {
        privately += one->table().size() - one->published() / tree.page_size();
        for (const std::int32_t page : one->table().from(one->published() / tree.page_size()))
          expect(pool.owner(page) == std::string("private"), "a page of a lease is private");
      }
    expect_equal(pool.owned(Owner::privately), privately, "private pages");
    expect_equal(pool.owned(Owner::cached), tree.counts(0, 0).present, "cached pages");
    for (const auto& [path, cells] : contents())
      if (cells[0].residency == Residency::present)
        expect(pool.owner(cells[0].id) == std::string("cached"), "a page of the tree is cached");
  }
  Contents contents() const { return contents_of(tree, kFull, tree.tiers()); }
  // Takes all of a namespace to the host, and away from the device; a lease then asks for it.
  void send_down(const char* ns, const std::string& key) {
    const Handle node = tree.locate(ns, bytes_of(key), static_cast<std::uint32_t>(key.size() / tree.page_bytes()));
    Ids ids(tree.end(node));
    std::iota(ids.begin(), ids.end(), 0);
    tree.attach(node, 0, 1, ids, true);
    pool.move(tree.evict(kPages, 0, 0)[0], Owner::cached, Owner::free);
    other = open(ns, key);
  }
  // Ends all leases and empties the tree: every page comes back.
  void close() {
    for (Lease* one : {lease.get(), other.get()})
      if (one) one->finish({});
    cache.end_load(1);  // if one has begun
    check();
    lease.reset();
    other.reset();
    cache.take_back();
    for (std::uint32_t tier = 0; tier < tree.tiers(); ++tier)
      expect_equal(tree.counts(0, tier).locked, 0, "pages locked in the end");
    if (tree.tiers() > 1) tree.evict(kPages, 0, 1);
    pool.move(tree.evict(kPages, 0, 0)[0], Owner::cached, Owner::free);
    check();
    expect_equal(pool.owned(Owner::free), kPages, "free pages in the end");
  }

  Tree tree;
  Pool pool{kPages};
  Cache cache{tree, pool, true};
  std::unique_ptr<Lease> lease, other;
};

struct LeaseOperation {
  const char* name;
  bool evicts;  // then what is left of the contents must be as it was
  std::function<void(Desk&)> prepare;
  std::function<void(Desk&)> run;
};

void no_preparation(Desk&) {}

const std::vector<LeaseOperation> kLeaseOperations{
    {"a lease on nothing", false, no_preparation, [](Desk& d) { d.other = d.open("d", run_of(100)); }},
    {"a lease that splits a node", false, no_preparation, [](Desk& d) { d.other = d.open("b", run_of(21, 7000)); }},
    {"a lease and a copy", false, no_preparation,
     [](Desk& d) {
       d.other = d.open("b", run_of(21, 7000));
       if (d.other->begin_copy()) d.other->end_copy(true);
     }},
    {"a copy for which a page is evicted", true,
     [](Desk& d) {
       d.lease->reserve(2 * d.pool.owned(Owner::free));
       d.other = d.open("b", run_of(21, 7000));
     },
     [](Desk& d) {
       if (d.other->begin_copy()) d.other->end_copy(false);
     }},
    {"reserve", false, no_preparation, [](Desk& d) { d.lease->reserve(60); }},
    {"reserve with eviction", true, no_preparation, [](Desk& d) { d.lease->reserve(150); }},
    {"append", false, no_preparation, [](Desk& d) { d.lease->append(bytes_of(run_of(50, 40))); }},
    {"publish", false, no_preparation, [](Desk& d) { d.lease->publish(31); }},
    {"publish the rest", false, [](Desk& d) { d.lease->publish(21); }, [](Desk& d) { d.lease->publish(40); }},
    {"publish a duplicate", false, [](Desk& d) { d.insert("a", run_of(30)); }, [](Desk& d) { d.lease->publish(40); }},
    {"publish a duplicate that parts", false, [](Desk& d) { d.insert("a", parted(60, 20)); },
     [](Desk& d) { d.lease->publish(40); }},
    {"finish", false, no_preparation, [](Desk& d) { d.lease->finish({}); }},
    {"finish with a duplicate", false, [](Desk& d) { d.insert("a", run_of(30)); },
     [](Desk& d) { d.lease->finish(40); }},
    {"abort", false, no_preparation, [](Desk& d) { d.lease->abort(); }},
    {"drop and take back", false, no_preparation,
     [](Desk& d) {
       d.lease.reset();
       d.cache.take_back();
     }},
};

// With a host, of whose pages a lease wants to load.
const std::vector<LeaseOperation> kLoadOperations{
    {"a lease on two tiers", false, [](Desk& d) { d.send_down("b", run_of(60, 7000)); },
     [](Desk& d) { d.other = d.open("b", run_of(41, 7000)); }},
    {"begin a load", false, [](Desk& d) { d.send_down("b", run_of(60, 7000)); },
     [](Desk& d) { d.other->begin_load(); }},
    {"begin a load with eviction", true,
     [](Desk& d) {
       d.send_down("b", run_of(60, 7000));
       d.insert("e", run_of(60, 500));
       d.lease->reserve(2 * d.pool.owned(Owner::free) - 20);
     },
     [](Desk& d) { d.other->begin_load(); }},
    {"a load that fails", false,
     [](Desk& d) {
       d.send_down("b", run_of(60, 7000));
       d.other->begin_load();
     },
     [](Desk& d) { d.other->end_load(false); }},
    {"close while loading", false,
     [](Desk& d) {
       d.send_down("b", run_of(60, 7000));
       d.other->begin_load();
     },
     [](Desk& d) {
       d.other->finish({});
       d.cache.end_load(1);
     }},
    {"drop while loading", false,
     [](Desk& d) {
       d.send_down("b", run_of(60, 7000));
       d.other->begin_load();
     },
     [](Desk& d) {
       d.other.reset();
       d.cache.end_load(1);
     }},
};

bool is_part(const Contents& some, const Contents& all) {
  for (const auto& [path, cells] : some) {
    const auto found = all.find(path);
    if (found == all.end() || found->second != cells) return false;
  }
  return true;
}

bool fail_in_lease(const LeaseOperation& operation, std::uint32_t tiers, long k) {
  Desk desk(tiers);
  operation.prepare(desk);
  const Contents before = desk.contents();
  const End end = fail(k, [&] { operation.run(desk); });
  if (end != End::failed) {
    desk.check();
    desk.close();
    return end == End::did_without;
  }
  desk.check();
  const Contents after = desk.contents();
  expect(operation.evicts ? is_part(after, before) : after == before, "the contents are the same");
  operation.run(desk);
  desk.check();
  desk.close();
  return true;
}

// With windows a lock may cut a node: what a lease locked on the device is let go if the host's lock fails.
bool fail_in_locks(long k) {
  Forest forest({{Kind::full}, {Kind::window, 16}});
  forest.insert("d", run_of(80), 0, true, 1);
  forest.insert("d", run_of(40));
  forest.tree.unlock(forest.pinned, 0);
  Pool pool(0);
  Cache cache(forest.tree, pool, true);
  const std::string key = run_of(80);
  const auto open = [&] {
    Lease lease(cache, "d", 0, bytes_of(key), 80, false, CheckRest());
    const std::uint64_t loadable = lease.loadable();
    lease.abort();
    return loadable;
  };
  const End end = fail(k, open);
  for (const std::uint32_t tier : {0u, 1u})
    expect_equal(forest.tree.counts(0, tier).locked, 0, "pages locked");
  expect_equal(cache.counters.leases, 0, "open leases");
  forest.tree.check();
  expect_equal(open(), 40, "positions on the host");
  return end != End::had_fewer;
}

// What a load brought may be left unpublished for want of memory: it is counted and kept, and published with what
// follows.
bool fail_in_arrival(bool duplicate, long k) {
  Desk desk(2);
  desk.send_down("b", run_of(60, 7000));
  desk.other->begin_load();
  if (duplicate) desk.insert("b", run_of(40, 7000));
  const End end = fail(k, [&] { desk.other->end_load(true); });
  desk.check();
  expect_equal(desk.other->hit(), 60, "the hit");
  expect_equal(desk.cache.counters.host_hit, 60, "positions hit on the host");
  if (end == End::failed) desk.other->publish(60);
  expect_equal(desk.other->published(), 60, "positions published");
  desk.check();
  desk.close();
  return end != End::had_fewer;
}

// Fails allocations until a run has so few that none fails; how many did.
void count(const std::string& name, const std::function<bool(long)>& fail) {
  long failed = 0;
  try {
    while (fail(failed))
      ++failed;
  } catch (const Failure& failure) {
    throw Failure{name + ", allocation " + std::to_string(failed) + ": " + failure.what};
  } catch (const Corrupt& error) {
    throw Failure{name + ", allocation " + std::to_string(failed) + ": " + error.message};
  } catch (const WrongOwner& error) {
    throw Failure{name + ", allocation " + std::to_string(failed) + ": " + error.message};
  } catch (const BadValue& error) {
    throw Failure{name + ", allocation " + std::to_string(failed) + ": " + error.name + " " + error.value};
  }
  std::printf("%s: %ld allocations failed\n", name.c_str(), failed);
}

void run() {
  const std::vector<std::pair<std::string, std::vector<Component>>> kinds{
      {"full", {{Kind::full}}},
      {"full and window", {{Kind::full}, {Kind::window, 16}}},
      {"full and state", {{Kind::full}, {Kind::state}}},
  };
  for (const auto& [kind, rows] : kinds) {
    for (const Operation& operation : kOperations) {
      const Contents before = prepared(operation, rows);
      count(kind + ": " + operation.name, [&](long k) { return fail_in_tree(operation, rows, before, k); });
    }
    for (const Operation& refusal : kRefusals) {
      const Contents before = prepared(refusal, rows);
      count(kind + ": refused: " + refusal.name, [&](long k) { return fail_in_refusal(refusal, rows, before, k); });
    }
  }
  for (const LeaseOperation& operation : kLeaseOperations)
    for (const std::uint32_t tiers : {1u, 2u})
      count(std::to_string(tiers) + (tiers == 1 ? " tier: " : " tiers: ") + operation.name,
            [&](long k) { return fail_in_lease(operation, tiers, k); });
  for (const LeaseOperation& operation : kLoadOperations)
    count(std::string("2 tiers: ") + operation.name, [&](long k) { return fail_in_lease(operation, 2, k); });
  count("2 tiers: a lease that cuts windows", fail_in_locks);
  count("2 tiers: a load that arrives", [](long k) { return fail_in_arrival(false, k); });
  count("2 tiers: a load that arrives as a duplicate", [](long k) { return fail_in_arrival(true, k); });
}

}  // namespace

}  // namespace mainstem

int main() {
  try {
    mainstem::run();
  } catch (const mainstem::Failure& failure) {
    std::printf("%s\n", failure.what.c_str());
    return 1;
  }
  return 0;
}
