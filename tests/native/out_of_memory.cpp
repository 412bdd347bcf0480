// Fails every allocation of every operation, one after another. Afterwards the tree must be sound and hold the same
// pages under the same prefixes, each page must have the same owner, and the same call must succeed once there is
// memory. Prints one line per operation.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <utility>

#include "lease/lease.h"
#include "support.h"

namespace {

long allocations_left = -1;  // below 0: none fails

bool fails_now() {
  return allocations_left >= 0 && allocations_left-- == 0;
}

}  // namespace

// The linker redirects the core's calls of malloc here (--wrap=malloc).
extern "C" void* __real_malloc(std::size_t bytes);
extern "C" void* __wrap_malloc(std::size_t bytes) {
  return fails_now() ? nullptr : __real_malloc(bytes);
}

// Not inlined, because the compiler would warn of a mismatch of new and free().
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

// The same with one symbol changed, so that the key parts there.
std::string parted(std::uint32_t length, std::uint32_t at, std::uint32_t first = 0) {
  return run_of(at, first) + symbol(99999, 4) + run_of(length - at - 1, first + at + 1);
}

// ---------------------------------------------------------------- the tree

const char* policy = "lru";

struct Forest {
  explicit Forest(const std::vector<Component>& rows) : rows(rows), tree(4, 1, rows, 2, policy, 42) {
    tree.remember(64);
    insert("b", run_of(30));
    tree.evict(10, 0, 0);  // there is something to remember
    node = insert("a", run_of(300));
    for (std::uint32_t i = 0; i < 6; ++i)
      insert("b", run_of(20 + 10 * i, 1000 * i));
    pinned = insert("c", run_of(40));
    tree.lock(pinned, 0);  // keeps it and the next piece apart
    insert("c", run_of(40, 40), pinned);
  }

  Handle insert(std::string_view ns, const std::string& key, Handle after = 0, bool ready = true,
                std::uint32_t tier = 0) {
    std::vector<Ids> ids;
    for (const Component& row : rows) {
      Ids& column = ids.emplace_back(row.per_page() ? key.size() / 4 : 1);
      std::iota(column.begin(), column.end(), next_id);
      next_id += static_cast<std::int32_t>(column.size());
    }
    std::vector<IdSpan> spans(ids.begin(), ids.end());
    return tree.insert(ns, after, {bytes_of(key), spans}, 0, tier, ready).node;
  }

  // Each tenant may have some ids of each column; one is known before it has any.
  void share_out(std::uint64_t most = 1000) {
    const Shares shares(rows.size() * 2, {1, most});
    tree.share_out(shares, {{tenant("a tenant that is known"), shares}});
  }

  // The namespace of a tenant, which is its own owner.
  static std::string tenant(const std::string& name) {
    std::string ns = "t";
    for (std::size_t at = 0; at < 8; ++at)
      ns += static_cast<char>(at ? 0 : name.size());
    return ns + name;
  }

  std::vector<Component> rows;
  Tree tree;
  Handle node = 0, pinned = 0;
  std::int32_t next_id = 0;
};

struct Operation {
  const char* name;
  std::function<void(Forest&)> prepare;  // with unlimited memory
  std::function<void(Forest&)> run;
};

void nothing(Forest&) {}

// Evicts; every evicted id must be returned.
void evict(Forest& f, std::uint64_t ids, std::uint32_t component) {
  const std::uint64_t before = f.tree.counts(component, 0).present;
  const std::vector<Ids> freed = f.tree.evict(ids, component, 0);
  if (before - f.tree.counts(component, 0).present != freed[component].size()) throw Failure{"ids were lost"};
}

// Puts host pages in flight for one component of a node; for everything that the host lacks of a path.
void attach(Forest& f, Handle node, std::uint32_t component) {
  Ids ids(f.rows[component].ids(f.tree.end(node) - f.tree.start(node)));
  std::iota(ids.begin(), ids.end(), f.next_id);
  f.tree.attach(node, component, 1, ids, false);
  f.next_id += static_cast<std::int32_t>(ids.size());
}
void attach_all(Forest& f, Handle end) {
  for (const Handle node : f.tree.lacking(end, 0, 1, 0))
    for (std::uint32_t component = 0; component < f.rows.size(); ++component)
      if (f.tree.presence(node, component, 1) == Presence::absent) attach(f, node, component);
}

IdCounts room_for(std::uint64_t ids) {
  IdCounts room;
  room.fill(ids);
  return room;
}

const std::vector<Operation> kOperations{
    {"insert into a new namespace", nothing, [](Forest& f) { f.insert("a tenant with a long name", run_of(100)); }},
    {"insert for a new owner", [](Forest& f) { f.share_out(); },
     [](Forest& f) { f.insert(Forest::tenant("a tenant with a long name"), run_of(100)); }},
    {"insert for an owner that is known", [](Forest& f) { f.share_out(); },
     [](Forest& f) { f.insert(Forest::tenant("a tenant that is known"), run_of(100)); }},
    {"share out", nothing, [](Forest& f) { f.share_out(); }},
    {"share out again", [](Forest& f) { f.share_out(); }, [](Forest& f) { f.share_out(5); }},
    {"insert a branch", nothing, [](Forest& f) { f.insert("a", parted(300, 150)); }},
    {"extend", nothing, [](Forest& f) { f.insert("a", run_of(100, 300), f.node); }},
    {"extend in flight", nothing, [](Forest& f) { f.insert("a", run_of(100, 300), f.node, false); }},
    {"extend in flight from the root", nothing, [](Forest& f) { f.insert("a", run_of(400), 0, false); }},
    {"fill another tier", nothing, [](Forest& f) { f.insert("a", run_of(200), 0, true, 1); }},
    {"match with a split", nothing, [](Forest& f) { f.tree.match("a", bytes_of(run_of(120)), true); }},
    {"match on two tiers", [](Forest& f) { f.insert("a", run_of(350), 0, true, 1); },
     [](Forest& f) { f.tree.match("a", bytes_of(run_of(320)), true); }},
    {"explain", nothing, [](Forest& f) { f.tree.explain("b", bytes_of(run_of(60)), true); }},
    {"views", nothing,
     [](Forest& f) {
       for (const std::string& ns : f.tree.namespaces())
         f.tree.nodes(ns);
     }},
    {"peek", nothing, [](Forest& f) { f.tree.peek("a", bytes_of(run_of(120)), true); }},
    {"lock", nothing, [](Forest& f) { f.tree.lock(f.node, 0); }},
    {"move a lock", [](Forest& f) { f.node = f.insert("c", run_of(50, 40), f.pinned); },
     [](Forest& f) { f.tree.move_lock(f.pinned, f.node, 0); }},
    {"retain with a split", nothing, [](Forest& f) { f.tree.retain("a", bytes_of(run_of(300)), 0, room_for(120)); }},
    {"retain a node", nothing, [](Forest& f) { f.tree.retain(f.node, 0, room_for(1000)); }},
    {"end a retention", [](Forest& f) { f.node = f.tree.retain("a", bytes_of(run_of(300)), 0, room_for(1000)).node; },
     [](Forest& f) { f.tree.end_retention(f.node, 0); }},
    {"split what is retained", [](Forest& f) { f.tree.retain("a", bytes_of(run_of(300)), 0, room_for(1000)); },
     [](Forest& f) { f.tree.match("a", bytes_of(run_of(120)), false); }},
    {"demote", nothing, [](Forest& f) { f.tree.demote("b", bytes_of(run_of(10)), 2); }},
    {"expect", nothing, [](Forest& f) { f.tree.expect("b", bytes_of(run_of(10)), 1, 0, 5); }},
    {"unlock with a join", nothing, [](Forest& f) { f.tree.unlock(f.pinned, 0); }},
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
    {"attach in flight below a node in flight",
     [](Forest& f) {
       attach_all(f, f.pinned);
       f.node = f.tree.match("c", bytes_of(run_of(80)), false).node;
     },
     [](Forest& f) { attach(f, f.node, 0); }},
    {"commit on two tiers", [](Forest& f) { attach_all(f, f.node); }, [](Forest& f) { f.tree.commit(f.node, 1); }},
    {"commit with a join",
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
       for (const Handle node : f.tree.hottest(0))
         f.tree.path_key(node);
       f.tree.hot_spans(0);
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

// A rejected call needs memory for its message.
const std::vector<Operation> kRefusals{
    {"settings", nothing, [](Forest&) { Tree(3, 1, {{Kind::full}}, 1, "lru", 1); }},
    {"a policy", nothing, [](Forest&) { Tree(4, 1, {{Kind::full}}, 1, "a policy that nobody knows", 1); }},
    {"a tier", nothing, [](Forest& f) { f.tree.lock(f.node, 12); }},
    {"a component", nothing, [](Forest& f) { f.tree.counts(12, 0); }},
    {"an insertion after a node in flight", [](Forest& f) { f.node = f.insert("a", run_of(100, 300), f.node, false); },
     [](Forest& f) { f.insert("a", run_of(10, 400), f.node); }},
    {"an insertion after a node without pages", nothing,
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
       Ids page_ids(2);
       pool.allocate(2, page_ids.data());
       page_ids[1] = page_ids[0];
       pool.move(page_ids, Owner::privately, Owner::free);
     }},
    {"a page", nothing, [](Forest&) { Pool(4).owner(1000000000); }},
};

// Attaching gives every page the same id, which check() would find; these tests look at ids elsewhere.
bool repeats_ids(const Operation& operation) {
  return std::string_view(operation.name).starts_with("attach");
}

// The contents of a forest before an operation: the same each time.
Contents prepared(const Operation& operation, const std::vector<Component>& rows) {
  Forest forest(rows);
  operation.prepare(forest);
  return contents_of(forest.tree, rows, 2);
}

// Returns whether a rejected call had at least k allocations.
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
  expect(refused || fired, "the call is rejected");
  forest.tree.check();
  expect(contents_of(forest.tree, rows, 2) == before, "the contents are the same");
  return fired;
}

// How many ids are locked, by component and tier.
std::vector<std::uint64_t> locks_of(const Tree& tree) {
  std::vector<std::uint64_t> locked;
  for (std::uint32_t component = 0; component < tree.rows().size(); ++component)
    for (std::uint32_t tier = 0; tier < tree.tiers(); ++tier)
      locked.push_back(tree.counts(component, tier).locked);
  return locked;
}

// Runs a function with its k-th allocation failing. An operation may do without that memory.
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

// Returns whether the operation had at least k allocations.
bool fail_in_tree(const Operation& operation, const std::vector<Component>& rows, const Contents& before, long k) {
  Forest forest(rows);
  operation.prepare(forest);
  const std::int32_t next_id = forest.next_id;
  const std::vector<std::uint64_t> locked = locks_of(forest.tree);
  const End end = fail(k, [&] { operation.run(forest); });
  if (end != End::failed) {
    if (!repeats_ids(operation)) forest.tree.check();
    return end == End::did_without;
  }
  forest.tree.check();
  expect(contents_of(forest.tree, rows, 2) == before, "the contents are the same");
  expect(locks_of(forest.tree) == locked, "the same is locked");
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
  std::unique_ptr<Lease> open(const char* ns, const std::string& key, std::uint32_t limit = 1000) {
    return std::make_unique<Lease>(cache, ns, 0, bytes_of(key), std::min<std::uint64_t>(limit, key.size() / 4), true,
                                   CheckRest());
  }
  void insert(const char* ns, const std::string& key) {
    const std::unique_ptr<Lease> writer = open(ns, key);
    writer->reserve(key.size() / 4 - writer->hit());
    writer->finish({});
  }
  // Every page is free, the tree's, or an open lease's.
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
      if (cells[0].presence == Presence::present)
        expect(pool.owner(cells[0].id) == std::string("cached"), "a page of the tree is cached");
  }
  Contents contents() const { return contents_of(tree, kFull, tree.tiers()); }
  // Moves a namespace from the device to the host; a lease then requests it.
  void send_down(const char* ns, const std::string& key) {
    const Handle node = tree.locate(ns, bytes_of(key), static_cast<std::uint32_t>(key.size() / tree.page_bytes()));
    Ids ids(tree.end(node));
    std::iota(ids.begin(), ids.end(), 0);
    tree.attach(node, 0, 1, ids, true);
    pool.move(tree.evict(kPages, 0, 0)[0], Owner::cached, Owner::free);
    other = open(ns, key);
  }
  // Ends all leases and empties the tree: every page is freed.
  void close() {
    for (Lease* one : {lease.get(), other.get()})
      if (one) one->finish({});
    cache.end_load(1);  // if one has begun
    check();
    lease.reset();
    other.reset();
    cache.end_abandoned();
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
  bool evicts;  // then the remaining contents must be unchanged
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
       d.cache.end_abandoned();
     }},
};

// With a host, from which a lease loads pages.
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
    if (found == all.end()) return false;
    for (std::size_t c = 0; c < cells.size(); ++c)
      if (cells[c].presence != Presence::absent && cells[c] != found->second[c]) return false;
  }
  return true;
}

bool fail_in_lease(const LeaseOperation& operation, std::uint32_t tiers, long k) {
  Desk desk(tiers);
  operation.prepare(desk);
  const Contents before = desk.contents();
  const std::vector<std::uint64_t> locked = locks_of(desk.tree);
  const End end = fail(k, [&] { operation.run(desk); });
  if (end != End::failed) {
    desk.check();
    desk.close();
    return end == End::did_without;
  }
  desk.check();
  const Contents after = desk.contents();
  expect(operation.evicts ? is_part(after, before) : after == before, "the contents are the same");
  expect(locks_of(desk.tree) == locked, "the same is locked");
  operation.run(desk);
  desk.check();
  desk.close();
  return true;
}

// With windows a lock may split a node: a lease unlocks the device if the lock on the host fails.
bool fail_in_locks(long k) {
  Forest forest({{Kind::full}, {Kind::window, 16}});
  forest.insert("d", run_of(80), 0, true, 1);
  forest.insert("d", run_of(40));
  forest.tree.unlock(forest.pinned, 0);
  Pool pages(0), window_pages(0);
  Cache cache(forest.tree, {&pages, &window_pages}, true);
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
  expect_equal(cache.counters.open, 0, "open leases");
  forest.tree.check();
  expect_equal(open(), 40, "positions on the host");
  return end != End::had_fewer;
}

// Loaded pages may stay unpublished for lack of memory: they are counted and kept, and published with the next pages.
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

// Fails one allocation after another until none is left to fail. Counts them.
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

// ---------------------------------------------------------------- a cache of several components

constexpr Component kPaged{Kind::full}, kSliding{Kind::window, 7}, kState{Kind::state, 0, 2, true};
const std::vector<std::pair<std::string, std::vector<Component>>> kMixtures{
    {"full and window", {kPaged, kSliding}},
    {"full and state", {kPaged, kState}},
    {"full, window and state", {kPaged, kSliding, kState}},
    {"window", {kSliding}},
    {"window and state", {kSliding, kState}},
};

// Some prefixes, and a lease that has computed 14 of its 24 positions, 12 of them first; nothing is published.
struct Mixture {
  explicit Mixture(const std::vector<Component>& rows) : rows(rows), tree(4, 2, rows, 2, "lru", 42) {
    for (const Component& row : rows)
      pools.push_back(std::make_unique<Pool>(row.per_page() ? 100 : 12));
    std::vector<Pool*> all;
    for (const auto& pool : pools)
      all.push_back(pool.get());
    cache = std::make_unique<Cache>(tree, std::move(all), true);
    cache->copy_state = [](std::int32_t, std::int32_t) {};
    write("b", run_of(40, 7000));
    write("b", parted(30, 19, 7000));
    write("c", run_of(10, 8000));
    lease = open("a", run_of(24));
    lease->reserve(24);
    lease->slide(0, 12);
    lease->slide(12, 14);
  }
  std::unique_ptr<Lease> open(const char* ns, const std::string& key) {
    return std::make_unique<Lease>(*cache, ns, 0, bytes_of(key), key.size() / 4, false, CheckRest());
  }
  // Computes six positions at a time, with a state after each.
  void write(const char* ns, const std::string& key, bool marked = true) {
    const std::unique_ptr<Lease> writer = open(ns, key);
    const std::uint64_t length = key.size() / 4;
    writer->reserve(length - writer->hit());
    for (std::uint64_t end, at = writer->hit(); at < length; at = end) {
      end = std::min(at + 6, length);
      writer->slide(at, end);
      if (marked && end % 2 == 0) writer->checkpoint(end, true);
      writer->publish(end);
    }
    writer->finish({});
  }
  Pool& last_pool() const { return *pools.back(); }
  Contents contents() const { return contents_of(tree, rows, 2); }
  // Moves a prefix from the device to the host; a lease then requests it and more.
  void send_down(const char* ns, const std::string& key) {
    const Handle end = tree.locate(ns, bytes_of(key), static_cast<std::uint32_t>(key.size() / tree.page_bytes()));
    for (const Handle node : tree.lacking(end, 0, 1, 0))
      for (std::uint32_t c = 0; c < rows.size(); ++c) {
        Ids ids = tree.own_ids(node, c, 0);
        if (!ids.empty()) tree.attach(node, c, 1, ids, true);
      }
    evict_all(0);
    other = open(ns, key + symbol(1, 4));
  }
  void evict_all(std::uint32_t tier) {
    for (std::uint32_t c = 0; c < rows.size(); ++c) {
      const std::vector<Ids> freed = tree.evict(1000, c, tier);
      for (std::size_t each = 0; each < freed.size() && tier == 0; ++each)
        pools[each]->move(freed[each], Owner::cached, Owner::free);
    }
  }

  // Every id is free, the tree's, or an open lease's; a state that waits to be published is not visible.
  void check() {
    cache->end_abandoned();
    tree.check();
    const Contents held = contents();
    for (std::uint32_t c = 0; c < rows.size(); ++c) {
      const Pool& pool = *pools[c];
      expect(pool.sound(), "the pool is sound");
      expect_equal(pool.owned(Owner::cached), tree.counts(c, 0).present, "cached ids");
      for (const auto& [path, cells] : held)
        if (cells[2 * c].presence == Presence::present)
          expect(pool.owner(cells[2 * c].id) == std::string("cached"), "an id of the tree is cached");
      std::uint64_t seen = 0, waiting = 0;
      for (const Lease* one : {lease.get(), other.get()}) {
        if (!one || one->closed()) continue;
        waiting += !rows[c].per_page();
        seen += rows[c].per_page() ? private_pages(*one, c) : one->state() >= 0;
      }
      const std::uint64_t privately = pool.owned(Owner::privately) - (&pool == &last_pool() ? taken.size() : 0);
      expect(seen <= privately && privately <= seen + waiting, "a private id is a lease's");
    }
  }
  std::uint64_t private_pages(const Lease& one, std::uint32_t c) const {
    std::uint64_t seen = 0;
    const Table& table = one.table(c);
    for (std::size_t page = 0; page < table.size(); ++page) {
      const std::int32_t id = *table.from(page).data();
      if (id < 0) continue;
      const bool shared = page < one.published() / tree.page_size();
      expect(pools[c]->owner(id) == std::string(shared ? "cached" : "private"), "a page of a lease is its own");
      seen += !shared;
    }
    return seen;
  }
  // Ends all leases and empties the tree: every id is freed.
  void close() {
    for (Lease* one : {lease.get(), other.get()})
      if (one) one->finish({});
    cache->end_load(1);  // if one has begun
    last_pool().move(std::exchange(taken, {}), Owner::privately, Owner::free);
    check();
    for (std::uint32_t tier = 0; tier < 2; ++tier) {
      for (std::uint32_t c = 0; c < rows.size(); ++c)
        expect_equal(tree.counts(c, tier).locked, 0, "ids locked in the end");
      evict_all(tier);
    }
    check();
    for (const auto& pool : pools)
      expect_equal(pool->owned(Owner::free), pool->total(), "free ids in the end");
    expect_equal(tree.size(), 0, "nodes in the end");
  }

  const std::vector<Component> rows;
  Tree tree;
  std::vector<std::unique_ptr<Pool>> pools;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<Lease> lease, other;
  Ids taken;  // of the last component, owned by no lease
};

enum class Change { none, less, more, any };  // how the contents may change if the call fails

struct MixedOperation {
  const char* name;
  Change change;
  std::function<void(Mixture&)> prepare;
  std::function<void(Mixture&)> run;
};

void nothing_before(Mixture&) {}
void compute_all(Mixture& m) {
  m.lease->slide(14, 24);
}
void mark(Mixture& m) {
  m.lease->checkpoint(14, true);
}
void mark_and_compute_all(Mixture& m) {
  mark(m);
  compute_all(m);
}
// Leaves nothing free of the last component.
void fill_last_pool(Mixture& m) {
  m.taken.resize(m.last_pool().owned(Owner::free));
  m.last_pool().allocate(m.taken.size(), m.taken.data());
}

const std::vector<MixedOperation> kMixedOperations{
    {"a lease on nothing", Change::none, nothing_before, [](Mixture& m) { m.other = m.open("d", run_of(50)); }},
    {"a lease on a prefix", Change::none, nothing_before, [](Mixture& m) { m.other = m.open("b", run_of(40, 7000)); }},
    {"a lease on the beginning of a prefix", Change::none, nothing_before,
     [](Mixture& m) { m.other = m.open("b", run_of(37, 7000)); }},
    {"reserve", Change::none, nothing_before, [](Mixture& m) { m.lease->reserve(80); }},
    {"reserve with eviction", Change::less, nothing_before, [](Mixture& m) { m.lease->reserve(160); }},
    {"slide", Change::none, nothing_before, compute_all},
    {"slide while others read", Change::none, nothing_before,
     [](Mixture& m) {
       std::vector<Table::Memory> readers;
       for (std::uint32_t c = 0; c < m.rows.size(); ++c)
         readers.push_back(m.lease->table(c).memory());
       m.lease->slide(14, 24);
     }},
    {"checkpoint", Change::none, nothing_before, mark},
    {"a checkpoint that replaces another", Change::none, [](Mixture& m) { m.lease->checkpoint(12, true); }, mark},
    {"publish", Change::none, nothing_before, [](Mixture& m) { m.lease->publish(14); }},
    {"publish in pieces", Change::none,
     [](Mixture& m) {
       compute_all(m);
       m.lease->publish(20);
     },
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish with a mark at the end", Change::none, mark, [](Mixture& m) { m.lease->publish(14); }},
    {"publish with a mark before the end", Change::more, mark_and_compute_all,
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish with a mark after the end", Change::none, mark, [](Mixture& m) { m.lease->publish(13); }},
    {"a mark at published pages", Change::none,
     [](Mixture& m) {
       m.lease->publish(14);
       mark(m);
     },
     [](Mixture& m) { m.lease->publish(14); }},
    {"publish a duplicate", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", run_of(22), false);
     },
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish a duplicate with its states", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", run_of(24));
       m.write("a", run_of(14));
     },
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish a duplicate that parts", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", parted(30, 20));
     },
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish what has holes", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", run_of(22));
       for (std::uint32_t c = 0; c < m.rows.size(); ++c)
         if (m.rows[c].begins_late()) m.pools[c]->move(m.tree.evict(99, c, 0)[c], Owner::cached, Owner::free);
     },
     [](Mixture& m) { m.lease->publish(24); }},
    {"publish while others read", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", run_of(20));
     },
     [](Mixture& m) {
       std::vector<Table::Memory> readers;
       for (std::uint32_t c = 0; c < m.rows.size(); ++c)
         readers.push_back(m.lease->table(c).memory());
       m.lease->publish(24);
     }},
    {"a path of too many states", Change::any, nothing_before,
     [](Mixture& m) {
       for (const std::uint64_t end : {14, 18, 22, 24}) {
         if (end <= m.lease->published()) continue;  // it got there before memory ran out
         m.lease->slide(std::max<std::uint64_t>(m.lease->published(), 14), end);
         m.lease->checkpoint(end, true);
         m.lease->publish(end);
       }
     }},
    {"a writer from beginning to end", Change::any, nothing_before,
     [](Mixture& m) { m.write("b", parted(40, 15, 7000)); }},
    {"finish", Change::more, mark_and_compute_all, [](Mixture& m) { m.lease->finish(24); }},
    {"finish with a duplicate", Change::more,
     [](Mixture& m) {
       mark_and_compute_all(m);
       m.write("a", run_of(22));
     },
     [](Mixture& m) { m.lease->finish({}); }},
    {"finish before the mark", Change::none, mark, [](Mixture& m) { m.lease->finish(12); }},
    {"abort", Change::none, mark_and_compute_all, [](Mixture& m) { m.lease->abort(); }},
    {"drop and take back", Change::none, mark_and_compute_all,
     [](Mixture& m) {
       m.lease.reset();
       m.cache->end_abandoned();
     }},
};

// Operations that load a prefix from the host.
void send_down(Mixture& m) {
  m.send_down("b", run_of(40, 7000));
  expect_equal(m.other->loadable(), 40, "positions on the host");
}
void begin_load(Mixture& m) {
  send_down(m);
  m.other->begin_load();
}
const std::vector<MixedOperation> kMixedLoads{
    {"a lease with a host", Change::none, send_down, [](Mixture& m) { m.other = m.open("b", run_of(39, 7000)); }},
    {"begin a load", Change::none, send_down, [](Mixture& m) { m.other->begin_load(); }},
    {"begin a load without a slot for the tree", Change::none,
     [](Mixture& m) {
       send_down(m);
       if (!m.rows.back().per_page()) fill_last_pool(m);
     },
     [](Mixture& m) { m.other->begin_load(); }},
    {"a load that arrives", Change::more, begin_load, [](Mixture& m) { m.other->end_load(true); }},
    {"a load that fails", Change::none, begin_load, [](Mixture& m) { m.other->end_load(false); }},
    {"drop while loading", Change::none, begin_load,
     [](Mixture& m) {
       m.other.reset();
       m.cache->end_load(1);
     }},
};

// Operations that evict from the last component, with nothing of it free.
const std::vector<MixedOperation> kShortOperations{
    {"a lease that makes room", Change::less, fill_last_pool,
     [](Mixture& m) { m.other = m.open("b", run_of(37, 7000)); }},
    {"slide with eviction", Change::less, fill_last_pool, compute_all},
    {"a checkpoint with eviction", Change::less, fill_last_pool, mark},
};

void expect_changed(Change change, const Contents& before, const Contents& after) {
  const bool less = change == Change::less || change == Change::any;
  const bool more = change == Change::more || change == Change::any;
  if (!less) expect(is_part(before, after), "nothing is gone");
  if (!more) expect(is_part(after, before), "nothing is new");
}

bool fail_in_mixture(const MixedOperation& operation, const std::vector<Component>& rows, long k) {
  Mixture mixture(rows);
  operation.prepare(mixture);
  mixture.check();
  const Contents before = mixture.contents();
  const End end = fail(k, [&] { operation.run(mixture); });
  mixture.check();
  if (end == End::failed) {
    expect_changed(operation.change, before, mixture.contents());
    operation.run(mixture);
    mixture.check();
  }
  mixture.close();
  return end != End::had_fewer;
}

struct CopyFailed {};

// Copying a state may fail: the slot is freed, and the lease is unchanged or not created.
void states_not_copied(const std::vector<Component>& rows) {
  Mixture mixture(rows);
  mixture.write("e", run_of(12));
  const Contents before = mixture.contents();
  const std::uint64_t free = mixture.last_pool().owned(Owner::free);
  const auto copy = std::exchange(mixture.cache->copy_state, [](std::int32_t, std::int32_t) { throw CopyFailed(); });
  thrown<CopyFailed>("a lease", [&] { mixture.open("e", run_of(20)); });
  thrown<CopyFailed>("a checkpoint", [&] { mark(mixture); });
  expect_equal(mixture.last_pool().owned(Owner::free), free, "slots free");
  mixture.check();
  mixture.cache->copy_state = copy;
  mark(mixture);
  mixture.cache->copy_state = [](std::int32_t, std::int32_t) { throw CopyFailed(); };
  thrown<CopyFailed>("a checkpoint that replaces another", [&] { mark(mixture); });
  expect_equal(mixture.last_pool().owned(Owner::free), free, "slots free");
  mixture.lease->publish(14);
  mixture.check();
  expect_equal(mixture.cache->counters.open, 1, "leases");
  expect(is_part(before, mixture.contents()), "nothing is gone");
  mixture.cache->copy_state = copy;
  mixture.close();
}

void run_mixtures() {
  for (const auto& [kind, rows] : kMixtures) {
    for (const std::vector<MixedOperation>* operations : {&kMixedOperations, &kMixedLoads, &kShortOperations})
      for (const MixedOperation& operation : *operations)
        count(kind + ": " + operation.name, [&](long k) { return fail_in_mixture(operation, rows, k); });
    if (!rows.back().per_page()) states_not_copied(rows);
  }
}

void run() {
  const std::vector<std::pair<std::string, std::vector<Component>>> kinds{
      {"full", {{Kind::full}}},
      {"full and window", {{Kind::full}, {Kind::window, 16}}},
      {"full and state", {{Kind::full}, {Kind::state}}},
  };
  for (const auto& [kind, rows] : kinds) {
    for (const char* const each : {"arc", "gittins", "lru", "tail"})
      for (const Operation& operation : kOperations) {
        policy = each;
        const Contents before = prepared(operation, rows);
        const std::string name = kind + ", " + policy + ": " + operation.name;
        count(name, [&](long k) { return fail_in_tree(operation, rows, before, k); });
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
  count("2 tiers: a lease that splits windows", fail_in_locks);
  run_mixtures();
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
