// See cases.h. Some cases break a structure through Probe, a friend of the tree, and expect check() to find it.
#include "cases.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>

#include "eviction/policies/reuse_index.h"
#include "lease/lease.h"
#include "python/copy.h"
#include "support.h"

namespace mainstem {

namespace {

const std::vector<Component> kFull{{Kind::full}};

std::string key_of(std::initializer_list<std::uint32_t> symbols) {
  std::string key;
  for (const std::uint32_t value : symbols)
    key += symbol(value, 4);
  return key;
}

InsertResult insert(Tree& tree, const std::string& key, std::int32_t first_id, std::size_t rows = 1, Handle after = 0,
                    bool ready = true, const char* ns = "") {
  std::vector<Ids> ids(rows, Ids(key.size() / tree.page_bytes()));
  for (Ids& column : ids) {
    std::iota(column.begin(), column.end(), first_id);
    first_id += 100;
  }
  const std::vector<IdSpan> spans(ids.begin(), ids.end());
  return tree.insert(ns, after, {bytes_of(key), spans}, 0, 0, ready);
}

// ---------------------------------------------------------------- rejected arguments

void expect_bad(const char* name, const std::function<void()>& call) {
  const BadValue error = thrown<BadValue>(name, call);
  expect(std::string(error.name) == name, std::string("the bad value is ") + error.name + ", not " + name);
  expect(!error.value.empty() && !error.allowed.empty(), "a bad value says what it is and what is allowed");
}

void bad_settings() {
  const auto make = [](std::uint32_t symbol_bytes, std::uint32_t page_size, std::size_t rows, std::uint32_t tiers,
                       const char* policy) {
    return [=] { Tree(symbol_bytes, page_size, std::vector<Component>(rows, {Kind::full}), tiers, policy, 1); };
  };
  expect_bad("symbol_bytes", make(5, 1, 1, 1, "lru"));
  expect_bad("page_size", make(4, 0, 1, 1, "lru"));
  expect_bad("page_size", make(4, (1u << 20) + 1, 1, 1, "lru"));
  expect_bad("components", make(4, 1, 0, 1, "lru"));
  expect_bad("components", make(4, 1, 9, 1, "lru"));
  expect_bad("tiers", make(4, 1, 1, 0, "lru"));
  expect_bad("tiers", make(4, 1, 1, 4, "lru"));
  expect_bad("policy", make(4, 1, 1, 1, "random"));
  make(16, 1u << 20, 8, 3, "external")();
}

void bad_keys() {
  Tree tree(4, 2, {{Kind::full}, {Kind::state}, {Kind::window, 3}}, 2, "lru", 1);
  const std::string key = key_of({1, 2, 3, 4});
  const Ids two{0, 1}, one{7}, negative{0, -1}, none{};
  const auto with = [&](Bytes symbols, std::vector<IdSpan> ids, std::uint32_t tier = 0) {
    return [=, &tree] { tree.insert("", 0, {symbols, ids}, 0, tier, true); };
  };
  const Bytes whole = bytes_of(key);
  expect_bad("key length in bytes", with(whole.first(7), {two, one, two}));
  expect_bad("key length in bytes", [&] { tree.match("", {whole.data(), std::size_t{1} << 33}, false); });
  expect_bad("ids", with(whole, {two, one}));
  expect_bad("number of page ids", with(whole, {one, one, two}));
  expect_bad("number of state ids", with(whole, {two, two, two}));
  expect_bad("page id", with(whole, {negative, one, two}));
  expect_bad("page id", with(whole, {two, one, negative}));
  expect_bad("tier", with(whole, {two, one, two}, 2));
  expect_bad("component", [&] { tree.counts(3, 0); });
  with(whole, {two, none, two})();
  Tree states(4, 2, {{Kind::state}}, 1, "lru", 1);
  expect_bad("ids", [&] { states.insert("", 0, {whole, std::vector<IdSpan>{none}}, 0, 0, true); });
  tree.check();
  states.check();
}

void bad_attachments() {
  Tree tree(4, 1, {{Kind::full}}, 2, "lru", 1);
  const Handle parent = insert(tree, key_of({1, 2}), 0).node;
  tree.lock(parent, 0);
  const Handle child = insert(tree, key_of({3}), 2, 1, parent).node;
  const Ids one{9}, two{8, 9}, negative{-1};
  expect_bad("number of ids", [&] { tree.attach(child, 0, 1, two, true); });
  expect_bad("id", [&] { tree.attach(child, 0, 1, negative, true); });
  expect_bad("cell", [&] { tree.attach(child, 0, 0, one, true); });
  expect_bad("cell of the parent", [&] { tree.attach(child, 0, 1, one, true); });
  expect_bad("node", [&] { tree.attach(0, 0, 1, one, true); });
  expect_bad("after", [&] {
    const IdSpan ids(one);
    tree.insert("", parent, {bytes_of(key_of({4})), {&ids, 1}}, 0, 1, true);
  });
  tree.attach(parent, 0, 1, two, false);
  expect_bad("after", [&] {
    const IdSpan ids(one);
    tree.insert("", parent, {bytes_of(key_of({4})), {&ids, 1}}, 0, 1, true);
  });
  const Ids seven{7};
  tree.attach(child, 0, 1, seven, false);
  expect_bad("node", [&] { tree.cancel(parent, 1); });
  tree.commit(child, 1);
  expect_bad("node", [&] { tree.commit(child, 1); });
  expect_bad("node", [&] { tree.cancel(child, 1); });
  expect_bad("node", [&] { tree.cancel(0, 1); });
  expect_bad("node", [&] { tree.commit(0, 1); });
  tree.check();
}

void lies_on() {
  Tree tree(4, 1, kFull, 1, "lru", 1);
  const Handle parent = insert(tree, key_of({1, 2}), 0).node;
  tree.lock(parent, 0);
  const Handle child = insert(tree, key_of({3}), 2, 1, parent).node;
  const std::string whole = key_of({1, 2, 3, 4});
  expect(tree.lies_on("", bytes_of(whole), 0), "the root is on every path");
  expect(tree.lies_on("", bytes_of(whole), child), "a node is on its path");
  expect(!tree.lies_on("a", bytes_of(whole), child), "not in another namespace");
  expect(!tree.lies_on("", bytes_of(key_of({1, 2})), child), "not on a path that ends above");
  expect(!tree.lies_on("", bytes_of(key_of({1, 2, 4})), child), "not on a path that parts in the node");
  expect(!tree.lies_on("", bytes_of(key_of({1, 5, 3})), child), "not on a path that parts above");
}

void pools() {
  Pool pool(3);
  Ids page_ids(3);
  pool.allocate(2, page_ids.data());
  const NoPages want = thrown<NoPages>("more pages than are free", [&] { pool.allocate(2, page_ids.data()); });
  expect_equal(want.free, 1, "pages free");
  const auto message = [&](const char* expected, Ids ids, Owner from) {
    const auto call = [&] { pool.move(ids, from, Owner::cached); };
    const WrongOwner error = thrown<WrongOwner>(expected, call);
    expect(error.message == expected, error.message);
    expect(pool.sound() && pool.owned(Owner::privately) == 2, "nothing has moved");
  };
  message("page 0 is named twice, not private", {0, 1, 0}, Owner::privately);
  message("page 2 is free, not private", {0, 2}, Owner::privately);
  message("page 0 is private, not cached", {0}, Owner::cached);
  message("page 9 is not in a pool of 3", {0, 9}, Owner::privately);
  message("page -1 is not in a pool of 3", {-1}, Owner::privately);
}

// ---------------------------------------------------------------- eviction

// External ranks: a candidate without one waits at the front, and stops eviction.
void external_ranks() {
  Tree tree(4, 1, kFull, 1, "external", 1);
  expect(!tree.waiting(0, 0), "no candidate waits in an empty tree");
  const Handle one = insert(tree, key_of({1, 2}), 0).node;
  const Handle two = insert(tree, key_of({3, 4}), 2).node;
  expect(tree.evict(1, 0, 0)[0].empty(), "nothing is evicted without a rank");
  for (int i = 0; i < 2; ++i) {
    const std::optional<NodeStats> waiting = tree.waiting(0, 0);
    expect(waiting.has_value(), "a candidate waits for its rank");
    tree.rank(waiting->node, 0, 0, {waiting->node == one ? 2.0 : 1.0, 0});
  }
  expect(!tree.waiting(0, 0), "all have a rank");
  tree.check();
  expect(tree.evict(2, 0, 0)[0] == Ids({2, 3}), "the lowest rank goes first");
  expect_bad("node", [&] { tree.rank(0, 0, 0, {1, 0}); });
  thrown<StaleHandle>("a rank of a node that is gone", [&] { tree.rank(two, 0, 0, {1, 0}); });
  for (const double major : {kUnranked, std::numeric_limits<double>::quiet_NaN()})
    expect_bad("rank", [&] { tree.rank(one, 0, 0, {major, 0}); });
  tree.lock(one, 0);
  expect_bad("node", [&] { tree.rank(one, 0, 0, {1, 0}); });
  tree.unlock(one, 0);
  expect(tree.waiting(0, 0).has_value(), "the policy is asked for a new rank");
  tree.check();
}

// Of equal ranks the lower depth comes first, then the lower index.
void equal_ranks() {
  Order order;
  order.reserve(6);
  const Rank rank{1, 2};
  order.put(3, rank, 7);
  order.put(2, rank, 7);
  order.put(1, rank, 8);
  order.put(4, {1, 1}, 9);
  order.put(5, {0, 9}, 9);
  expect(order.holds(3, rank, 7) && !order.holds(3, rank, 8) && !order.holds(3, {1, 3}, 7), "what an order holds");
  expect(!order.contains(99), "an order does not contain a node beyond its room");
  for (const Index next : {5u, 4u, 2u, 3u, 1u}) {
    expect_equal(order.top(), next, "the first of an order");
    order.remove(next);
    expect(order.sound(), "an order is sound");
  }
}

void old_generations() {
  Tree tree(4, 1, kFull, 1, "lru", 1);
  for (int i = 0; i < 2; ++i) {
    const Handle node = insert(tree, key_of({1, 2, 3}), 0).node;
    Probe::node(tree, node).generation = Node::kMaxGenerations;
    const Handle last =
        Handle{Node::kMaxGenerations} << 32 | Probe::index(tree, Handle{Node::kMaxGenerations} << 32 | 2);
    expect_equal(tree.end(last), 3, "the end of a node of the last generation");
    tree.evict(i == 0 ? 1 : 3, 0, 0);
    thrown<StaleHandle>("a handle of the previous generation", [&] { tree.end(last); });
    tree.evict(3, 0, 0);
    tree.check();
  }
}

// ---------------------------------------------------------------- faults that check() finds

// A full tree of some nodes, with a lock; each fault breaks one thing in it.
struct Broken {
  Broken() : tree(4, 1, kFull, 1, "lru", 1) {
    parent = insert(tree, key_of({1, 2}), 0).node;
    tree.lock(parent, 0);
    child = insert(tree, key_of({3, 4}), 2, 1, parent).node;
    other = insert(tree, key_of({5}), 4, 1, parent).node;
    leaf = insert(tree, key_of({8, 9, 10}), 6, 1, 0, true, "a").node;
    insert(tree, key_of({7}), 5);
  }
  Tree tree;
  Handle parent = 0, child = 0, other = 0, leaf = 0;
};

struct Fault {
  const char* rule;
  std::function<void(Broken&)> make;
};

const std::vector<Fault> kFaults{
    {"the child table holds each node once",
     [](Broken& b) {
       Probe::table(b.tree).reserve(1);
       Probe::table(b.tree).insert(12345, Probe::index(b.tree, b.leaf));
     }},
    {"roots are counted", [](Broken& b) { ++Probe::roots(b.tree); }},
    {"a free node is not alive", [](Broken& b) { Probe::free(b.tree) = Probe::index(b.tree, b.leaf); }},
    {"a node is alive or free",
     [](Broken& b) {
       b.tree.evict(3, 0, 0);
       Probe::free(b.tree) = kNone;
     }},
    {"a free node cannot be evicted",
     [](Broken& b) {
       b.tree.evict(1000, 0, 0);
       Probe::order(b.tree).put(Probe::free(b.tree), {1, 0}, 0);
     }},
    {"a root is found by its name", [](Broken& b) { Probe::root(b.tree, "a").key.drop_back(1); }},
    {"a root has no pages", [](Broken& b) { Probe::root(b.tree, "a").pages = 1; }},
    {"children are counted, and the last is known", [](Broken& b) { Probe::root(b.tree, "a").branches = 0; }},
    {"a node holds at least one page", [](Broken& b) { Probe::node(b.tree, b.leaf).pages = 0; }},
    {"the key has the length of the pages", [](Broken& b) { ++Probe::node(b.tree, b.leaf).pages; }},
    {"a node begins where its parent ends", [](Broken& b) { ++Probe::node(b.tree, b.leaf).start; }},
    {"a node is found by its parent and first page",
     [](Broken& b) {
       const std::string other = key_of({11, 12, 13});
       Probe::node(b.tree, b.leaf).key = Run<std::uint8_t>(bytes_of(other).data(), other.size());
     }},
    {"a node has a cell, a child or a lock",
     [](Broken& b) {
       Probe::cell(b.tree, b.leaf, 0).transfer = kNone;
       --Probe::root_cell(b.tree, "a").holders;
     }},
    {"siblings are linked both ways", [](Broken& b) { Probe::node(b.tree, b.other).previous = kNone; }},
    {"siblings are linked both ways", [](Broken& b) { Probe::node(b.tree, b.child).previous = 5; }},
    {"siblings are linked both ways",
     [](Broken& b) { std::swap(Probe::node(b.tree, b.child).parent, Probe::node(b.tree, b.leaf).parent); }},
    {"children are counted, and the last is known",
     [](Broken& b) { Probe::node(b.tree, b.parent).branches = 3 * Node::kChild; }},
    {"children are counted, and the last is known",
     [](Broken& b) { Probe::node(b.tree, b.parent).last_child = kNone; }},
    {"two children part at the recorded fork", [](Broken& b) { ++Probe::node(b.tree, b.parent).fork_word; }},
    {"a cell has an id for each page, or none",
     [](Broken& b) { Probe::cell(b.tree, b.leaf, 0).ids = Run<std::int32_t>(); }},
    {"a cell in flight names its transfer", [](Broken& b) { Probe::cell(b.tree, b.leaf, 0).transfer = 12345; }},
    {"a root holds no pages", [](Broken& b) { Probe::root_cell(b.tree, "a").transfer = kHere; }},
    {"children that hold a cell are counted", [](Broken& b) { ++Probe::cell(b.tree, b.leaf, 0).holders; }},
    {"a child holds a cell only if its parent does",
     [](Broken& b) {
       Cell& cell = Probe::cell(b.tree, b.parent, 0);
       cell.transfer = kNone;
       cell.ids = Run<std::int32_t>();
       --Probe::root_cell(b.tree, "").holders;
     }},
    {"exactly the cells that can be evicted are in the order",
     [](Broken& b) { Probe::order(b.tree).remove(Probe::index(b.tree, b.leaf)); }},
    {"the order has the node's rank", [](Broken& b) { Probe::node(b.tree, b.leaf).accessed = 999; }},
    {"locks add up along the path", [](Broken& b) { ++Probe::pins(b.tree, b.parent); }},
    {"what is retained is locked", [](Broken& b) { ++Probe::retained(b.tree, b.leaf); }},
    {"what a prefix needs is retained with it",
     [](Broken& b) {
       b.tree.lock(b.child, 0);
       ++Probe::retained(b.tree, b.child);
     }},
    {"pages are counted", [](Broken& b) { ++Probe::counts(b.tree).present; }},
    {"pages are counted", [](Broken& b) { ++Probe::counts(b.tree).locked; }},
    {"pages are counted", [](Broken& b) { ++Probe::counts(b.tree).in_flight; }},
    {"page 7 has one owner",
     [](Broken& b) {
       const Ids ids{7, 7, 8};
       Probe::cell(b.tree, b.leaf, 0).ids = Run<std::int32_t>(ids.data(), ids.size());
     }},
};

void faults() {
  Broken().tree.check();
  for (const Fault& fault : kFaults) {
    Broken broken;
    fault.make(broken);
    const Corrupt error = thrown<Corrupt>(fault.rule, [&] { broken.tree.check(); });
    expect(error.message.ends_with(fault.rule), error.message + ", where it should be: " + fault.rule);
  }
}

void window_boundary() {
  Tree tree(4, 1, {{Kind::full}, {Kind::window, 2}}, 1, "lru", 1);
  const Handle node = insert(tree, key_of({1, 2, 3, 4}), 0, 2).node;
  Probe::pins(tree, node) = 1;
  const Corrupt error = thrown<Corrupt>("a lock without its boundary", [&] { tree.check(); });
  expect(error.message.ends_with("a window lock begins at a node boundary"), error.message);
}

// ---------------------------------------------------------------- joins

// Two pieces of a chain become one node if nothing keeps them apart.
void joins() {
  const auto nodes_of = [](const char* policy, std::uint32_t tiers,
                           const std::function<void(Tree&, Handle)>& keep_apart, std::uint32_t pages = 2) {
    Tree tree(4, 1, kFull, tiers, policy, 1);
    std::string key;
    for (std::uint32_t i = 0; i < pages; ++i)
      key += symbol(i, 4);
    const Handle upper = insert(tree, key, 0).node;
    tree.lock(upper, 0);
    const Handle lower = insert(tree, key_of({90, 91}), 100000, 1, upper).node;
    keep_apart(tree, upper);
    tree.unlock(upper, 0);
    tree.check();
    expect_equal(tree.end(lower), pages + 2, "the end of the lower piece");
    return tree.size();
  };
  const auto nothing = [](Tree&, Handle) {};
  expect_equal(nodes_of("lru", 1, nothing), 1, "nodes of a chain");
  expect_equal(nodes_of("external", 1, nothing), 2, "nodes with external ranks");
  expect_equal(nodes_of("fifo", 1, nothing), 2, "nodes that differ for fifo");
  expect_equal(nodes_of("lru", 1, nothing, 4095), 2, "nodes of a chain too long for one");
  const auto hit = [](Tree& tree, Handle) { tree.match("", bytes_of(key_of({0, 1})), false); };
  expect_equal(nodes_of("lru", 1, hit), 2, "nodes of which one was hit");
  const auto raise = [](Tree& tree, Handle) {
    const Ids ids{7, 8};
    const IdSpan span(ids);
    tree.insert("", 0, {bytes_of(key_of({0, 1})), {&span, 1}}, 9, 0, true);
  };
  expect_equal(nodes_of("lru", 1, raise), 2, "nodes of which one has a priority");
  const auto branch = [](Tree& tree, Handle upper) { insert(tree, key_of({50}), 50, 1, upper); };
  expect_equal(nodes_of("lru", 1, branch), 3, "nodes where a chain branches");
  const auto back_up = [](Tree& tree, Handle upper) {
    const Ids ids{7, 8};
    tree.attach(upper, 0, 1, ids, true);
  };
  expect_equal(nodes_of("lru", 2, back_up), 2, "nodes of which one is on two tiers");
  const auto pin = [](Tree& tree, Handle upper) { tree.lock(upper, 1); };
  expect_equal(nodes_of("lru", 2, pin), 2, "nodes where a lock of the other tier ends");
  const auto move_away = [](Tree& tree, Handle upper) {
    tree.lock(upper, 0);
    tree.move_lock(upper, 0, 0);
  };
  expect_equal(nodes_of("lru", 1, move_away), 1, "nodes after a lock was moved to the root");
}

// ---------------------------------------------------------------- the rest

// At a branch a partial match tries the youngest 32 children only.
void many_siblings() {
  Tree tree(4, 2, kFull, 1, "lru", 1);
  for (std::uint32_t i = 0; i < 33; ++i)
    insert(tree, key_of({i, 1}), static_cast<std::int32_t>(i));
  expect_equal(tree.match("", bytes_of(key_of({1, 2})), true).partial, 1, "symbols of one of the youngest");
  expect_equal(tree.match("", bytes_of(key_of({0, 2})), true).partial, 0, "symbols of the oldest");
  expect_equal(tree.peek("", bytes_of(key_of({0, 2})), true).partial, 0, "symbols of the oldest, peeked");
}

// A node kept by a lock only: nothing is present or in flight there.
void only_locked() {
  Tree tree(4, 1, kFull, 1, "lru", 1);
  const Handle there = insert(tree, key_of({1}), 0).node;
  tree.lock(there, 0);
  const Handle node = insert(tree, key_of({2}), 1, 1, there, false).node;
  tree.lock(node, 0);
  expect_equal(tree.match("", bytes_of(key_of({1, 2})), false).pending_pages, 1, "pages pending");
  tree.cancel(node, 0);
  tree.check();
  const MatchResult found = tree.match("", bytes_of(key_of({1, 2})), false);
  expect(found.pages == 1 && found.pending_pages == 0, "cancelled pages are not pending");
  expect_bad("after", [&] { insert(tree, key_of({3}), 5, 1, node); });
  tree.unlock(node, 0);
  tree.unlock(there, 0);
  tree.check();
  expect_equal(tree.size(), 1, "nodes");
  for (const Handle handle : {Handle{-1}, Handle{1} << 32, Handle{1} << 32 | 999, node})
    thrown<StaleHandle>("a handle of no node", [&] { tree.end(handle); });
}

void views() {
  Tree tree(4, 1, {{Kind::full}, {Kind::state}}, 2, "lru", 1);
  const std::string key = key_of({1, 2, 3});
  const Ids page_ids{5, 6, 7}, state{9};
  const std::vector<IdSpan> ids{page_ids, state};
  const Handle node = tree.insert("", 0, {bytes_of(key), ids}, 4, 0, true).node;
  Ids out(3);
  tree.copy_ids(node, 1, 0, 0, out.data());
  expect(out == Ids({-1, -1, 9}), "a state's id is at the end of its node");
  tree.copy_ids(node, 0, 1, 0, out.data());
  expect(out == Ids({-1, -1, -1}), "absent ids are -1");
  const NodeView view = tree.nodes("").front();
  expect_equal(view.stats.priority, 4, "the priority of a node");
  expect(view.key == key, "the key of a node");
  expect(tree.nodes("nowhere").empty() && tree.namespaces() == std::vector<std::string>{""}, "namespaces");
  expect(tree.one_id_a_page(0) && !tree.one_id_a_page(1) && !tree.one_id_a_page(2), "ids per page");
  expect(tree.bytes() > 0, "the memory of a tree");
  expect_equal(tree.peek("", bytes_of(key), true).pages, 3, "pages peeked with a state");
  expect_equal(tree.peek("nowhere", bytes_of(key), true).pages, 0, "pages peeked in no namespace");
}

void disabled_cache() {
  Tree tree(4, 1, kFull, 1, "lru", 1);
  Pool pool(4);
  Cache cache(tree, pool, false);
  const std::string key = key_of({1, 2, 3});
  std::size_t asked = 1;
  Lease lease(cache, "", 0, bytes_of(key), 3, true, [&](std::size_t known) { asked = known; });
  expect_equal(asked, 0, "symbols known");
  expect(!lease.begin_copy(), "nothing is copied");
  lease.reserve(3);
  lease.finish(3);
  expect_equal(tree.size(), 0, "nodes of a tree that is not used");
  Lease unchecked(cache, "", 0, bytes_of(key), 3, true, {});
  expect_equal(unchecked.hit(), 0, "the hit where nothing is matched");
}

// A cache of four pages; the tree has one page in each namespace of `written`.
struct Small {
  explicit Small(std::initializer_list<const char*> written) {
    for (const char* ns : written) {
      const std::unique_ptr<Lease> lease = open(ns, {1, 2});
      lease->reserve(2);
      lease->finish(2);
    }
  }
  std::unique_ptr<Lease> open(const char* ns, std::initializer_list<std::uint32_t> symbols) {
    return std::make_unique<Lease>(cache, ns, 0, bytes_of(key_of(symbols)), symbols.size(), true, CheckRest());
  }
  Tree tree{4, 2, kFull, 1, "lru", 1};
  Pool pool{4};
  Cache cache{tree, pool, true};
};

// The hook that makes room may run any code, and may even end the lease that called it.
void lease_closed_by_hook() {
  Small small{"a", "b", "c", "d"};
  const std::unique_ptr<Lease> lease = small.open("", {1, 2});
  small.cache.evict = [&](std::uint32_t, std::uint64_t pages, std::string_view) {
    lease->abort();
    small.pool.move(small.tree.evict(pages, 0, 0)[0], Owner::cached, Owner::free);
  };
  thrown<Closed>("a lease that ended while room was made", [&] { lease->reserve(2); });
  expect_equal(small.pool.owned(Owner::privately), 0, "private pages");
  expect_equal(small.pool.owned(Owner::free), 1, "free pages");
}

// The hook may reserve pages of the lease that called it.
void lease_reserved_by_hook() {
  Small small{"a", "b", "c", "d"};
  const std::unique_ptr<Lease> lease = small.open("", {1, 2, 3, 4});
  bool asked = false;
  small.cache.evict = [&](std::uint32_t, std::uint64_t, std::string_view) {
    small.pool.move(small.tree.evict(2, 0, 0)[0], Owner::cached, Owner::free);
    if (!std::exchange(asked, true)) lease->reserve(2);
  };
  lease->reserve(2);
  expect_equal(lease->reserved(), 4, "positions reserved");
  expect_equal(lease->table().size(), 2, "pages for them");
}

// An error in the hook propagates, and nothing stays locked.
void hook_fails() {
  Small small{"a", "b", "c", "d"};
  const std::unique_ptr<Lease> lease = small.open("a", {1, 7});
  small.cache.evict = [](std::uint32_t, std::uint64_t, std::string_view) { throw Failure{"the hook failed"}; };
  thrown<Failure>("reserving", [&] { lease->reserve(2); });
  thrown<Failure>("copying", [&] { lease->begin_copy(); });
  expect_equal(small.tree.counts(0, 0).locked, 0, "pages locked");
  small.cache.evict = nullptr;
  const std::optional<PageCopy> copy = lease->begin_copy();
  expect(copy && copy->positions == 1, "a position is copied");
  expect_equal(small.tree.counts(0, 0).locked, 1, "pages locked while one is copied");
  lease->end_copy(true);
  expect_equal(lease->hit(), 1, "the hit");
  small.tree.check();
}

void long_arrays() {
  constexpr std::size_t kLargePage = std::size_t{2} << 20;
  Array<std::uint64_t> numbers;
  for (std::uint64_t i = 0; i < 2'000'000; ++i)
    numbers.push_back(i);
  expect(reinterpret_cast<std::uintptr_t>(numbers.begin()) % kLargePage == 0, "long arrays start at a page");
  expect(numbers.bytes() < 17'000'000, "they have little spare room");
  thrown<std::bad_alloc>("more memory than there is", [&] { numbers.reserve(std::size_t{1} << 57); });
  for (std::uint64_t i = 0; i < numbers.size(); ++i)
    expect_equal(numbers[i], i, "a number after all that growth");
}

// The page to copy is locked, so it is not evicted for its own copy.
void no_page_for_a_copy() {
  Small small{"a"};
  const std::unique_ptr<Lease> filler = small.open("b", {1, 2, 3, 4, 5, 6});
  filler->reserve(6);
  const std::unique_ptr<Lease> lease = small.open("a", {1, 7});
  expect(!lease->begin_copy(), "there is no page for a copy");
  expect_equal(small.cache.counters.partial_missed, 1, "copies missed");
  expect_equal(small.tree.counts(0, 0).present, 1, "pages cached");
}

// ---------------------------------------------------------------- two tiers

void paths() {
  Tree tree(4, 1, kFull, 2, "lru", 1);
  const Handle upper = insert(tree, key_of({1, 2}), 0).node;
  tree.lock(upper, 0);
  const Handle lower = insert(tree, key_of({3, 4}), 2, 1, upper).node;
  expect(tree.path_key(0) == std::pair<std::string, std::string>(), "the root has no key");
  expect(tree.path_key(lower) == std::pair<std::string, std::string>("", key_of({1, 2, 3, 4})), "the key of a path");
  expect(tree.lacking(0, 0, 1, 0).empty(), "the root lacks nothing");
  expect(tree.lacking(lower, 0, 1, 0) == std::vector<Handle>({upper, lower}), "everything is lacking, from the top");
  expect(tree.lacking(lower, 0, 1, 1).empty(), "nothing was hit");
  tree.match("", bytes_of(key_of({1, 2})), false);
  expect(tree.lacking(lower, 0, 1, 1) == std::vector<Handle>({upper}), "the upper node was hit");
  expect_equal(tree.hottest(0).front(), upper, "the hottest node");
  expect_equal(tree.hottest(0).back(), lower, "the coolest node");
  expect(tree.hottest(1).empty(), "nothing is on the host");
  expect_equal(tree.parent(lower), upper, "the parent of a node");
  expect_equal(tree.parent(upper), 0, "the root has no handle");
  const std::vector<PathSpan> spans = tree.hot_spans(0);
  expect_equal(spans.size(), 2, "each node is a span");
  expect_equal(spans[1].from, 0, "after the hotter one");
  expect_equal(spans[1].at, tree.end(upper), "where the hotter one ends");
  expect(spans[1].symbols == tree.path_key(lower, tree.end(upper)).second, "its own symbols");
  expect(spans[0].symbols + spans[1].symbols == tree.path_key(lower).second, "all symbols, once");
  expect(tree.hot_spans(1).empty(), "nothing is listed for the host");
  const Ids two{7, 8};
  tree.attach(upper, 0, 1, two, false);
  expect_equal(tree.in_flight_above(lower, 1), upper, "the transfer of the upper node");
  expect_equal(tree.in_flight_above(upper, 1), 0, "nothing is in flight above it");
  expect_equal(tree.in_flight_above(0, 1), 0, "nothing is in flight above the root");
  expect(tree.lacking(lower, 0, 1, 0) == std::vector<Handle>({lower}), "a node in flight is not lacking");
  expect(tree.own_ids(upper, 0, 1).empty(), "a node in flight is not present");
  expect(tree.own_ids(lower, 0, 0) == Ids({2, 3}), "the node's own ids");
  for (const std::uint32_t tier : {2u, 3u}) {
    expect_bad("tier", [&] { tree.lacking(lower, 0, tier, 0); });
    expect_bad("tier", [&] { tree.lacking(lower, tier, 0, 0); });
    expect_bad("tier", [&] { tree.in_flight_above(lower, tier); });
    expect_bad("tier", [&] { tree.presence(lower, 0, tier); });
    expect_bad("tier", [&] { tree.hottest(tier); });
    expect_bad("tier", [&] { tree.hot_spans(tier); });
    expect_bad("tier", [&] { tree.own_ids(lower, 0, tier); });
    expect_bad("tier", [&] { tree.next_victim(0, tier); });
  }
  expect_bad("component", [&] { tree.presence(lower, 1, 0); });
  expect_bad("component", [&] { tree.own_ids(lower, 1, 0); });
  expect_bad("component", [&] { tree.next_victim(1, 0); });
  thrown<StaleHandle>("a handle of no node", [&] { tree.lacking(Handle{7} << 40 | 3, 0, 1, 0); });
}

// A hole on both tiers ends what can be copied.
void gap() {
  Tree tree(4, 1, {{Kind::full}, {Kind::window, 1}}, 2, "lru", 1);
  const Handle node = insert(tree, key_of({1, 2}), 0, 2).node;
  tree.lock(node, 1);
  tree.evict(2, 0, 0);
  const Ids one{7};
  tree.attach(node, 1, 0, one, true);  // the lock on the host has split the node: it holds the last page
  expect(tree.lacking(node, 0, 1, 0).empty() && tree.end(node) == 2, "a page on no tier cannot be copied");
}

void locate_splits() {
  Tree tree(4, 1, kFull, 2, "lru", 1);
  const std::string key = key_of({1, 2, 3, 4});
  const Handle node = insert(tree, key, 0).node;
  expect_equal(tree.locate("", bytes_of(key), 4), node, "the node that ends there");
  expect_equal(tree.size(), 1, "nodes");
  for (const std::uint32_t pages : {0u, 5u})
    expect_equal(tree.locate("", bytes_of(key), pages), 0, "no such place");
  expect_equal(tree.locate("", bytes_of(key_of({1, 2, 9})), 3), 0, "a key that parts earlier");
  expect_equal(tree.locate("nowhere", bytes_of(key), 2), 0, "no such namespace");
  expect_equal(tree.size(), 1, "nodes");
  const Handle upper = tree.locate("", bytes_of(key), 3);
  expect(upper && tree.end(upper) == 3 && tree.start(node) == 3 && tree.size() == 2, "the node was split");
  expect_equal(tree.locate("", bytes_of(key), 3), upper, "the same place again");
  tree.check();
}

void next_victims() {
  Tree tree(4, 1, kFull, 1, "external", 1);
  expect_equal(tree.next_victim(0, 0), 0, "no node is next in an empty tree");
  const Handle node = insert(tree, key_of({1}), 0).node;
  expect_equal(tree.next_victim(0, 0), 0, "a node without a rank is not next");
  tree.rank(node, 0, 0, {1, 0});
  expect_equal(tree.next_victim(0, 0), node, "the only one is next");
  tree.lock(node, 0);
  expect_equal(tree.next_victim(0, 0), 0, "a locked node is not next");
}

// Each decoded page is backed up by itself: once its copy is complete it joins its parent, and the chain stays one
// node.
void commit_joins() {
  Tree tree(4, 1, kFull, 2, "lru", 1);
  Handle end = insert(tree, key_of({1, 2}), 0).node;
  const Ids two{50, 51};
  tree.attach(end, 0, 1, two, true);
  for (std::int32_t page = 2; page < 6; ++page) {
    tree.lock(end, 0);
    const Handle next = insert(tree, key_of({static_cast<std::uint32_t>(page) + 1}), page, 1, end).node;
    tree.move_lock(end, next, 0);
    tree.unlock(next, 0);
    expect_equal(tree.size(), 2, "nodes while a page is on one tier only");
    const Ids one{50 + page};
    tree.attach(next, 0, 1, one, false);
    expect_equal(tree.size(), 2, "nodes while a page is in flight");
    tree.commit(next, 1);
    tree.check();
    expect_equal(tree.size(), 1, "nodes of a chain on both tiers");
    thrown<StaleHandle>("a node that was joined", [&] { tree.end(end); });
    end = next;
  }
  expect(tree.own_ids(end, 0, 0) == Ids({0, 1, 2, 3, 4, 5}), "the ids on the device");
  expect(tree.own_ids(end, 0, 1) == Ids({50, 51, 52, 53, 54, 55}), "the ids on the host");
}

// A cache over two tiers, pages of two symbols, and a prefix of four pages: the host has all of them, the device two.
struct Tiered {
  explicit Tiered(std::uint32_t device_pages = 8) : pool(device_pages) {
    std::unique_ptr<Lease> writer = open(symbols);
    writer->reserve(8);
    writer->finish(8);
    const Handle node = tree.locate("", bytes_of(key_of(symbols)), 4);
    const Ids host{4, 5, 6, 7};
    tree.attach(node, 0, 1, host, true);
    pool.move(tree.evict(2, 0, 0)[0], Owner::cached, Owner::free);
    cache.take_touched();
  }
  std::unique_ptr<Lease> open(std::initializer_list<std::uint32_t> key) {
    return std::make_unique<Lease>(cache, "", 0, bytes_of(key_of(key)), key.size(), true, CheckRest());
  }
  void expect_private(std::uint64_t pages) const {
    expect_equal(pool.owned(Owner::privately), pages, "private pages");
    tree.check();
  }
  void expect_locked(std::uint64_t device, std::uint64_t host) const {
    expect_equal(tree.counts(0, 0).locked, device, "pages locked on the device");
    expect_equal(tree.counts(0, 1).locked, host, "pages locked on the host");
  }
  static constexpr std::initializer_list<std::uint32_t> symbols{1, 2, 3, 4, 5, 6, 7, 8};
  Tree tree{4, 2, kFull, 2, "lru", 1};
  Pool pool;
  Cache cache{tree, pool, true};
};

void load_arrives() {
  Tiered tiers;
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8, 9});
  expect_equal(lease->hit(), 4, "the hit on the device");
  expect_equal(lease->loadable(), 4, "positions on the host");
  tiers.expect_locked(2, 4);
  const PageLoad load = lease->begin_load();
  expect(load.id != 0 && load.source[0] == Ids({6, 7}), "the pages to load");
  expect_bad("lease", [&] { lease->begin_load(); });
  expect_equal(lease->publishable(), 4, "positions that may be published while pages are written");
  expect(!lease->begin_copy(), "nothing is copied while pages are written");
  lease->publish(4);
  lease->reserve(1);
  expect_equal(lease->reserved(), 9, "positions reserved meanwhile");
  expect_equal(tiers.cache.counters.hit, 4, "positions hit before they have arrived");
  const std::unique_ptr<Lease> other = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  expect_equal(other->hit(), 4, "nobody else finds pages that have not arrived");
  lease->end_load(true);
  expect_equal(lease->hit(), 8, "the hit after all pages have arrived");
  expect_equal(lease->published(), 8, "positions published");
  expect_equal(tiers.cache.counters.hit, 8, "positions hit");
  expect_equal(tiers.cache.counters.host_hit, 4, "positions hit on the host");
  expect_equal(tiers.open({1, 2, 3, 4, 5, 6, 7, 8})->hit(), 8, "the hit of a later lease");
  tiers.cache.end_abandoned();
  other->begin_load();
  other->end_load(true);
  expect_equal(tiers.cache.counters.duplicate_pages, 2, "duplicate pages");
  expect(std::ranges::equal(other->table().from(2), lease->table().part(2, 4)), "the table names the tree's");
  other->abort();
  lease->abort();
  tiers.expect_private(0);
  tiers.expect_locked(0, 0);
}

void load_fails() {
  Tiered tiers;
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  lease->begin_load();
  lease->end_load(false);
  expect_equal(lease->hit(), 4, "the hit of a load that failed");
  expect_equal(lease->loadable(), 0, "positions to load after that");
  tiers.expect_locked(2, 0);
  expect_bad("lease", [&] { lease->begin_load(); });
  lease->reserve(0);
  lease->finish(8);
  expect_equal(tiers.tree.counts(0, 0).present, 4, "pages that were computed instead");
  tiers.expect_private(0);
}

// A load is too late once something was reserved, or computed and published.
void load_refused() {
  Tiered tiers;
  const std::unique_ptr<Lease> nothing = tiers.open({9, 9});
  expect_bad("lease", [&] { nothing->begin_load(); });
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  lease->reserve(0);
  const std::unique_ptr<Lease> copying = tiers.open({1, 2, 3, 4, 5, 9});
  lease->reserve(4);
  expect_bad("lease", [&] { lease->begin_load(); });
  lease->publish(8);
  expect_bad("lease", [&] { lease->begin_load(); });
  expect(copying->begin_copy() == std::nullopt, "a donor on the host only");
  tiers.expect_private(0);
}

// The same for a copy inside a page: once the following page is published, there is nothing to copy.
void copy_too_late() {
  Tiered tiers;
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 9});
  lease->reserve(2);
  lease->publish(4);
  expect(!lease->begin_copy(), "a copy of computed positions");
  const std::unique_ptr<Lease> other = tiers.open({1, 2, 3, 8});
  const std::optional<PageCopy> copy = other->begin_copy();
  expect(copy && copy->positions == 1, "a position is copied");
  expect_bad("lease", [&] { other->begin_load(); });
}

void no_room_to_load() {
  Tiered tiers(5);
  const std::unique_ptr<Lease> filler = tiers.open({9, 9, 9, 9});
  filler->reserve(4);
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  const NoPages error = thrown<NoPages>("a load without room", [&] { lease->begin_load(); });
  expect_equal(error.needed, 2, "pages needed");
  expect_equal(lease->reserved(), 4, "positions reserved");
  filler->abort();
  expect_equal(lease->begin_load().target[0].size(), 2, "pages to load once there is room");
  lease->end_load(true);
  expect_equal(lease->hit(), 8, "the hit");
}

// Pages of a lease that ended while they were written stay private until the copy is complete.
void load_of_a_closed_lease() {
  const std::vector<std::function<void(std::unique_ptr<Lease>&)>> ends{
      [](std::unique_ptr<Lease>& lease) { lease.reset(); },
      [](std::unique_ptr<Lease>& lease) { lease->abort(); },
      [](std::unique_ptr<Lease>& lease) { lease->finish({}); },
      [](std::unique_ptr<Lease>& lease) { lease->finish(4); },
  };
  for (const auto& end : ends) {
    Tiered tiers;
    std::unique_ptr<Lease> dropped = tiers.open({1, 2, 3, 4});
    std::unique_ptr<Lease> lease = tiers.open(Tiered::symbols);
    const std::uint64_t load = lease->begin_load().id;
    lease->reserve(2);
    end(lease);
    dropped.reset();
    tiers.cache.end_abandoned();
    tiers.expect_private(3);
    tiers.expect_locked(2, 4);
    expect_equal(tiers.cache.counters.open, 1, "leases whose pages are written");
    const std::unique_ptr<Lease> other = tiers.open({9, 9});
    thrown<NoPages>("pages still being written", [&] { other->reserve(8); });
    tiers.cache.end_load(load + 1);
    tiers.expect_private(3);
    tiers.cache.end_load(load);
    tiers.expect_private(0);
    tiers.expect_locked(0, 0);
    other->reserve(8);
    if (lease) thrown<Closed>("the end of a load", [&] { lease->end_load(true); });
  }
}

// Several loads of closed leases end in another order.
void loads_end_in_any_order() {
  Tiered tiers(12);
  std::vector<std::uint64_t> loads;
  for (int i = 0; i < 3; ++i)
    loads.push_back(tiers.open(Tiered::symbols)->begin_load().id);
  tiers.open({1, 2});
  tiers.expect_private(6);
  tiers.cache.end_load(loads[1]);
  tiers.expect_private(4);
  tiers.cache.end_load(loads[2]);
  tiers.cache.end_load(loads[0]);
  tiers.expect_private(0);
  tiers.expect_locked(0, 0);
  expect_equal(tiers.cache.counters.open, 0, "leases");
}

// The hook that makes room may end the lease that called it, here too.
void lease_closed_while_loading() {
  Tiered tiers(4);
  const std::unique_ptr<Lease> other = tiers.open({9, 9});
  other->reserve(2);
  other->finish(2);
  const std::unique_ptr<Lease> lease = tiers.open(Tiered::symbols);
  expect_equal(lease->loadable(), 4, "positions on the host");
  tiers.cache.evict = [&](std::uint32_t, std::uint64_t, std::string_view) {
    lease->abort();
    tiers.pool.move(tiers.tree.evict(3, 0, 0)[0], Owner::cached, Owner::free);
  };
  thrown<Closed>("a lease that ended while room was made", [&] { lease->begin_load(); });
  tiers.expect_private(0);
  tiers.expect_locked(0, 0);
}

void touched_nodes() {
  Tiered tiers;
  const std::unique_ptr<Lease> lease = tiers.open(Tiered::symbols);
  tiers.open(Tiered::symbols);
  tiers.open({7, 7});
  const Handle host = tiers.tree.locate("", bytes_of(key_of(Tiered::symbols)), 4);
  expect(tiers.cache.take_touched() == std::vector<Handle>{host}, "a node matched twice is named once");
  expect(tiers.cache.take_touched().empty(), "taken nodes are gone");
  lease->reserve(4);
  lease->publish(6);
  lease->publish(8);
  expect_equal(tiers.cache.take_touched().size(), 2, "nodes published");
  for (Handle node = 1; node < 100'000; ++node)
    tiers.cache.touched(node);
  expect_equal(tiers.cache.take_touched().size(), 1 << 16, "nodes, at most");
  tiers.cache.touched(1);
  expect_equal(tiers.cache.take_touched().size(), 1, "nodes after that");
  Small one{"a"};
  one.cache.touched(1);
  expect(one.cache.take_touched().empty(), "with one tier nothing is recorded");
}

// ---------------------------------------------------------------- windows and states

constexpr Component kPaged{Kind::full}, kSliding{Kind::window, 4}, kState{Kind::state};

// A cache of several components, with pages of two symbols and `room` ids for each component.
struct Mixed {
  explicit Mixed(std::vector<Component> rows = {kPaged, kSliding, kState}, std::uint32_t room = 12, bool enabled = true,
                 std::uint32_t tiers = 1)
      : tree(4, 2, rows, tiers, "lru", 1), pools(rows.size(), Pool(room)) {
    std::vector<Pool*> all;
    for (Pool& pool : pools)
      all.push_back(&pool);
    cache = std::make_unique<Cache>(tree, all, enabled);
    cache->copy_state = [this](std::int32_t source, std::int32_t target) { copies.emplace_back(source, target); };
  }
  std::unique_ptr<Lease> open(std::initializer_list<std::uint32_t> key) {
    return std::make_unique<Lease>(*cache, "", 0, bytes_of(key_of(key)), key.size(), false, CheckRest());
  }
  // A lease that has computed up to `end`, with a checkpoint there.
  std::unique_ptr<Lease> marked(std::initializer_list<std::uint32_t> key, std::uint64_t end) {
    std::unique_ptr<Lease> lease = open(key);
    lease->reserve(end - lease->hit());
    lease->slide(lease->hit(), end);
    expect(lease->checkpoint(end, true), "a checkpoint is taken");
    return lease;
  }
  void free_evicted(const std::vector<Ids>& freed) {
    for (std::size_t c = 0; c < freed.size(); ++c)
      pools[c].move(freed[c], Owner::cached, Owner::free);
  }
  void expect_private(std::uint32_t component, std::uint64_t ids) const {
    expect_equal(pools[component].owned(Owner::privately), ids, "private ids");
    tree.check();
  }
  void expect_nothing_private() const {
    for (std::uint32_t c = 0; c < pools.size(); ++c)
      expect_private(c, 0);
  }
  std::uint64_t hit(std::initializer_list<std::uint32_t> key) {
    return std::uint64_t{tree.peek("", bytes_of(key_of(key)), false).pages} * 2;
  }

  Tree tree;
  std::vector<Pool> pools;
  std::unique_ptr<Cache> cache;
  std::vector<std::pair<std::int32_t, std::int32_t>> copies;
};

void bad_mixtures() {
  Tree two(4, 2, {kPaged, kState}, 1, "lru", 1);
  Tree state(4, 2, {kState}, 1, "lru", 1);
  Pool pool(4);
  expect_bad("pools", [&] { Cache(two, pool, true); });
  expect_bad("components", [&] { Cache(state, pool, true); });
  Mixed mixed;
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8});
  lease->reserve(8);
  expect_bad("end", [&] { lease->slide(0, 9); });
  expect_bad("begin", [&] { lease->slide(5, 4); });
  expect_bad("begin", [&] { lease->slide(1, 4); });
  lease->slide(0, 6);
  lease->publish(2);
  for (const std::uint64_t position : {0, 3, 8})
    expect_bad("position", [&] { lease->checkpoint(position, true); });
  mixed.expect_private(2, 1);
}

void mark_at_published_node() {
  Mixed mixed;
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4});
  lease->reserve(4);
  lease->slide(0, 4);
  lease->publish(4);
  expect_equal(mixed.hit({1, 2, 3, 4}), 0, "the hit without a state");
  lease->checkpoint(4, true);
  expect_equal(mixed.copies.back().first, lease->state(), "the state that was copied");
  lease->publish(4);
  expect_equal(mixed.hit({1, 2, 3, 4}), 4, "the hit with a state");
  expect_equal(mixed.cache->counters.checkpoints, 1, "states published");
  mixed.expect_private(2, 1);
  // The next lease computes with a copy.
  const std::unique_ptr<Lease> next = mixed.open({1, 2, 3, 4});
  const std::pair<std::int32_t, std::int32_t> first{mixed.copies[0].second, next->state()};
  expect(mixed.copies.back() == first && next->state() != first.first, "the tree's state was copied");
}

// The second lease has computed the same: its pages and its state are freed.
void mark_finds_state() {
  for (const bool pages_first : {false, true}) {
    Mixed mixed;
    const std::unique_ptr<Lease> one = mixed.marked({1, 2, 3, 4}, 4), two = mixed.marked({1, 2, 3, 4}, 4);
    if (pages_first) {
      two->publish(2);
      one->publish(4);
      two->publish(4);
      two->checkpoint(4, true);
      two->publish(4);
    } else {
      one->publish(4);
      two->publish(4);
    }
    expect_equal(mixed.cache->counters.checkpoints, 1, "states published");
    expect_equal(mixed.tree.counts(2, 0).present, 1, "states of the tree");
    mixed.expect_private(2, 2);
    for (const std::uint32_t c : {0u, 1u}) {
      mixed.expect_private(c, 0);
      expect(std::ranges::equal(one->table(c).from(0), two->table(c).from(0)), "both read the tree's pages");
    }
  }
}

// Pages in flight stop a publication before them; the state waits with the rest.
void blocked_publish_keeps_mark() {
  Mixed mixed({kPaged, kState});
  Ids coming(2);
  mixed.pools[0].allocate(2, coming.data());
  const std::string key = key_of({1, 2, 3, 4});
  const std::vector<IdSpan> ids{coming, {}};
  const Handle node = mixed.tree.insert("", 0, {bytes_of(key), ids}, 0, 0, false).node;
  const std::unique_ptr<Lease> lease = mixed.marked({1, 2, 3, 4}, 4);
  lease->publish(4);
  expect_equal(lease->published(), 0, "positions published before pages in flight");
  mixed.expect_private(1, 2);
  mixed.tree.commit(node, 0);
  mixed.pools[0].move(coming, Owner::privately, Owner::cached);
  lease->publish(4);
  expect_equal(lease->published(), 4, "positions published");
  expect_equal(mixed.hit({1, 2, 3, 4}), 4, "the hit with a state");
  mixed.expect_private(1, 1);
  mixed.expect_private(0, 0);
}

// A state in flight to that place counts as present.
void mark_beside_state_in_flight() {
  Mixed mixed({kPaged, kState});
  const std::unique_ptr<Lease> lease = mixed.marked({1, 2, 3, 4}, 2);
  lease->publish(2);
  lease->reserve(2);
  lease->publish(4);
  Ids state(1);
  mixed.pools[1].allocate(1, state.data());
  const std::string key = key_of({1, 2, 3, 4});
  const Handle node = mixed.tree.locate("", bytes_of(key), 2);
  mixed.tree.attach(node, 1, 0, state, false);
  lease->checkpoint(4, true);
  lease->publish(4);
  mixed.expect_private(1, 2);
  expect_equal(mixed.cache->counters.checkpoints, 1, "states published");
  expect(mixed.tree.cancel(node, 0)[1] == state, "the state in flight");
  mixed.pools[1].move(state, Owner::privately, Owner::free);
  lease->abort();
  mixed.expect_nothing_private();
}

// Without a cache nothing is published, and still a lease holds only its window.
void slide_without_cache() {
  Mixed mixed({kPaged, kSliding, kState}, 12, false);
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  lease->reserve(10);
  for (std::uint64_t at = 0; at < 10; at += 2) {
    lease->slide(at, at + 2);
    lease->publish(at + 2);
    mixed.expect_private(1, std::min<std::uint64_t>(at / 2 + 1, 3));
  }
  const Table& table = lease->table(1);
  expect(table.part(0, 2)[0] == -1 && table.part(0, 2)[1] == -1 && table.part(2, 3)[0] >= 0,
         "entries before the window");
  expect(!lease->checkpoint(10, true), "no checkpoint without a cache");
  expect(mixed.copies.empty() && lease->state() >= 0, "the state is the lease's own");
  lease->finish(10);
  mixed.expect_nothing_private();
  expect_equal(mixed.tree.size(), 0, "nodes of a tree that is not used");
}

void finish_publishes_mark() {
  Mixed mixed;
  mixed.marked({1, 2, 3, 4, 5}, 4)->finish(5 - 1);
  expect_equal(mixed.hit({1, 2, 3, 4}), 4, "the hit with a state");
  mixed.marked({1, 2, 9, 9}, 4)->finish(2);  // the state is after that
  expect_equal(mixed.tree.counts(2, 0).present, 1, "states of the tree");
  mixed.marked({7, 7}, 2)->abort();
  expect_equal(mixed.cache->counters.checkpoints, 1, "states published");
  mixed.expect_nothing_private();
}

void dropped_lease_is_freed() {
  Mixed mixed;
  mixed.marked({1, 2, 3, 4, 5, 6, 7, 8}, 8);
  for (const std::uint32_t c : {0u, 1u})
    mixed.expect_private(c, 4);
  mixed.expect_private(2, 2);
  mixed.cache->end_abandoned();
  mixed.expect_nothing_private();
  std::unique_ptr<Lease> lease = mixed.marked({1, 2, 3, 4, 5, 6, 7, 8}, 8);
  lease->publish(6);
  lease.reset();
  expect_equal(mixed.tree.counts(1, 0).locked, 2, "window pages locked by a dropped lease");
  mixed.cache->end_abandoned();
  mixed.expect_nothing_private();
  expect_equal(mixed.tree.counts(0, 0).locked + mixed.tree.counts(1, 0).locked, 0, "pages locked");
}

void too_few_by_name() {
  Mixed mixed({kPaged, kSliding, kState}, 3);
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8});
  const auto expect_few = [&](const char* what, std::uint64_t needed, const std::function<void()>& call) {
    const NoPages error = thrown<NoPages>(what, call);
    expect(error.what == std::string(what), std::string("there are too few ") + error.what + ", not " + what);
    expect(error.needed == needed && error.total == 3, "how many are needed, and how many there are");
  };
  expect_few("pages", 4, [&] { lease->reserve(8); });
  lease->reserve(6);
  const std::unique_ptr<Lease> other = mixed.open({9, 9}), third = mixed.open({8, 8});
  expect_few("state slots", 1, [&] { mixed.open({7, 7}); });
  expect_equal(mixed.cache->counters.open, 3, "leases");
  lease->slide(0, 4);
  expect(!lease->checkpoint(4, true) && !lease->checkpoint(4, false), "there is no slot for a checkpoint");
  expect_equal(mixed.cache->counters.checkpoints_missed, 2, "checkpoints missed");
  lease->publish(4);
  mixed.expect_private(1, 0);
  Ids rest(mixed.pools[1].owned(Owner::free));
  mixed.pools[1].allocate(rest.size(), rest.data());
  expect_few("window pages", 1, [&] { lease->slide(4, 6); });  // the tree's are locked
  expect_equal(lease->table(1).size(), 2, "window pages of a lease that found none");
  mixed.pools[1].move(rest, Owner::privately, Owner::free);
  lease->slide(4, 6);
  mixed.expect_private(1, 1);
}

// The hook that makes room may end the lease that called it.
void mixed_lease_closed_by_hook() {
  const std::vector<std::pair<std::uint32_t, std::function<void(Lease&)>>> calls{
      {1, [](Lease& lease) { lease.slide(0, 4); }},
      {2, [](Lease& lease) { lease.checkpoint(2, true); }},
  };
  for (const auto& [component, call] : calls) {
    Mixed mixed({kPaged, kSliding, kState}, 3);
    mixed.marked({5, 5}, 2)->finish(2);
    const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4});
    lease->reserve(4);
    if (component == 2) lease->slide(0, 2);
    Ids rest(mixed.pools[component].owned(Owner::free));
    mixed.pools[component].allocate(rest.size(), rest.data());
    mixed.cache->evict = [&](std::uint32_t c, std::uint64_t ids, std::string_view) {
      lease->abort();
      mixed.free_evicted(mixed.tree.evict(ids, c, 0));
    };
    if (component == 1) {  // slide() needs one more than the tree has
      mixed.pools[1].move(IdSpan(rest).first(1), Owner::privately, Owner::free);
      rest.erase(rest.begin());
    }
    thrown<Closed>("a lease that ended while room was made", [&] { call(*lease); });
    mixed.pools[component].move(rest, Owner::privately, Owner::free);
    mixed.expect_nothing_private();
  }
}

// All layers slide: pages before the window are freed, and cannot be published any more.
void only_windows() {
  Mixed mixed({kSliding});
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  expect_equal(lease->state(), -1, "no state");
  lease->reserve(10);
  lease->slide(0, 8);
  lease->slide(8, 10);
  lease->publish(4);
  expect_equal(lease->published(), 0, "positions published without pages");
  lease->publish(10);
  expect_equal(lease->published(), 10, "positions published");
  expect_equal(mixed.tree.counts(0, 0).present, 3, "pages of the tree");
  expect_equal(mixed.hit({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), 10, "the hit");
  expect_equal(mixed.hit({1, 2, 3, 4}), 0, "the hit before the window");
}

// A lease holds its window and nothing before it. No window holds full pages after it.
void window_of_a_lease() {
  Mixed mixed({kPaged, kSliding});
  std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8});
  lease->reserve(8);
  lease->slide(0, 8);
  lease->publish(8);
  mixed.free_evicted(mixed.tree.evict(99, 1, 0));
  expect_equal(mixed.tree.counts(1, 0).present, 2, "window pages that a lease holds");
  const std::unique_ptr<Lease> shorter = mixed.open({1, 2, 3, 4});
  expect_equal(shorter->hit(), 0, "a hit without its window");
  expect_equal(shorter->reach(), 4, "the reach of full attention");
  const std::string key = key_of({1, 2, 3, 4, 5, 6, 7, 8, 9});
  const Lease cut(*mixed.cache, "", 0, bytes_of(key), 4, false, CheckRest());
  expect_equal(cut.reach(), 8, "the reach of full attention past the limit of the match");
  lease->abort();
  mixed.free_evicted(mixed.tree.evict(99, 1, 0));
  expect_equal(cut.hit(), 0, "a hit without its window");
  expect_equal(mixed.tree.counts(1, 0).present, 0, "window pages");
  expect_equal(mixed.tree.counts(0, 0).present, 4, "pages of full attention");
}

// After a split, the state stays at the end of the node.
void split_below_state() {
  Mixed mixed({kPaged, kState});
  mixed.marked({1, 2, 3, 4, 5, 6}, 6)->finish(6);
  mixed.marked({1, 2, 3, 4, 7, 8}, 6)->finish(6);
  expect_equal(mixed.tree.size(), 3, "nodes");
  expect_equal(mixed.hit({1, 2, 3, 4, 9, 9}), 0, "the hit where the paths part");
  expect_equal(mixed.hit({1, 2, 3, 4, 5, 6}), 6, "the hit on one path");
  expect_equal(mixed.hit({1, 2, 3, 4, 7, 8}), 6, "the hit on the other path");
}

// A path keeps the state at its end, and the one that saves most before it.
void states_on_a_path() {
  Mixed mixed({kPaged, {Kind::state, 0, 2}});
  const std::unique_ptr<Lease> lease = mixed.open({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  lease->reserve(10);
  for (const std::uint64_t end : {2, 6, 8, 10}) {
    lease->checkpoint(end, true);
    lease->publish(end);
    expect(mixed.tree.counts(1, 0).present <= 2, "states on a path");
    expect_equal(mixed.hit({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), end, "the hit");
  }
  expect_equal(mixed.hit({1, 2, 3, 4, 5, 6, 7, 8}), 6, "the hit before the end");
  mixed.expect_private(1, 1);
  expect_equal(mixed.pools[1].owned(Owner::cached), 2, "slots of the tree");
}

// Locked states stay even if there are too many.
void thin_leaves_what_is_held() {
  Tree tree(4, 1, {kPaged, kState}, 1, "lru", 1);
  Handle node = 0;
  const Ids states{0, 1, 2};
  for (std::int32_t at = 0; at < 3; ++at) {
    const Ids page{at};
    const std::vector<IdSpan> ids{page, IdSpan(states).subspan(static_cast<std::size_t>(at), 1)};
    const Handle above = node;
    node = tree.insert("", node, {bytes_of(key_of({static_cast<std::uint32_t>(at)})), ids}, 0, 0, true).node;
    if (at == 1) tree.lock(above, 0);
  }
  expect_bad("tier", [&] { tree.thin(node, 1, 1, 1); });
  expect_bad("component", [&] { tree.thin(node, 2, 0, 1); });
  expect(tree.thin(node, 1, 0, 3).empty(), "three are not too many");
  expect(tree.thin(node, 1, 0, 1) == Ids({1}), "the only unlocked one");
  expect(tree.thin(node, 1, 0, 1).empty(), "the rest stays");
  expect(tree.thin(0, 1, 0, 0).empty(), "no state at the root");
  tree.check();
}

// States that save more stay longer; unused states age by the worth of evicted ones.
void weighed_states() {
  Mixed mixed({kPaged, {Kind::state, 0, 0, true}});
  const auto write = [&](std::initializer_list<std::uint32_t> key) { mixed.marked(key, key.size())->finish({}); };
  write({1, 1});
  write({1, 1, 8, 8});
  mixed.open({1, 1, 1});            // useful again, though a sequence has grown past it: others part there now
  write({1, 1, 2, 2, 3, 3, 4, 4});  // saves three more pages
  write({5, 5, 6, 6});
  const auto hits = [&](std::uint64_t one, std::uint64_t four, std::uint64_t two) {
    expect_equal(mixed.hit({1, 1}), one, "the hit of one page");
    expect_equal(mixed.hit({1, 1, 2, 2, 3, 3, 4, 4}), four, "the hit of four pages");
    expect_equal(mixed.hit({5, 5, 6, 6}), two, "the hit of two pages");
    mixed.tree.check();
  };
  hits(2, 8, 4);
  mixed.free_evicted(mixed.tree.evict(2, 1, 0));
  hits(0, 8, 4);
  mixed.open({5, 5, 6, 6});  // saves two
  write({7, 7});             // saves one
  mixed.cache->end_abandoned();
  mixed.free_evicted(mixed.tree.evict(1, 1, 0));
  hits(0, 8, 4);
  expect_equal(mixed.hit({7, 7}), 0, "the hit of the newest state, which saves least");
  mixed.free_evicted(mixed.tree.evict(1, 1, 0));
  hits(0, 8, 0);  // the other one saves four pages since the state above it is gone
}

// Four pages with states after the second and the fourth; the host has the components `rows`.
struct MixedTiers : Mixed {
  explicit MixedTiers(std::initializer_list<std::uint32_t> rows, std::uint32_t room = 12)
      : Mixed({kPaged, kSliding, kState}, room, true, 2) {
    const std::unique_ptr<Lease> writer = marked({1, 2, 3, 4, 5, 6, 7, 8}, 4);
    writer->publish(4);
    writer->reserve(4);
    writer->slide(4, 8);
    writer->checkpoint(8, true);
    writer->finish(8);
    const Handle end = tree.locate("", bytes_of(key_of({1, 2, 3, 4, 5, 6, 7, 8})), 4);
    for (const Handle node : tree.lacking(end, 0, 1, 0))
      for (const std::uint32_t c : rows)
        if (const Ids ids = tree.own_ids(node, c, 0); !ids.empty()) tree.attach(node, c, 1, ids, true);
  }
};

// A failed load leaves the lease as it was at its hit, with the state there.
void mixed_load_fails() {
  for (const bool arrives : {false, true}) {
    MixedTiers tiers({0, 1, 2});
    tiers.free_evicted(tiers.tree.evict(2, 0, 0));
    const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8, 9});
    expect(lease->hit() == 4 && lease->loadable() == 4, "positions on the device and on the host");
    expect(lease->checkpoint(4, true), "a checkpoint at the hit");
    const PageLoad load = lease->begin_load();
    expect(load.source[0].size() == 2 && load.source[1].size() == 2, "pages to load");
    expect(load.target[2].size() == 2 && load.target[2][0] == lease->state(),
           "a state to compute with, and the tree's");
    tiers.copies.clear();
    lease->end_load(arrives);
    expect_equal(lease->hit(), arrives ? 8 : 4, "the hit");
    expect_equal(tiers.copies.size(), !arrives, "states copied again");
    expect_equal(lease->table(1).size(), arrives ? 4 : 2, "window pages");
    tiers.expect_private(1, 0);
    tiers.expect_private(2, 1);
    lease->abort();
    tiers.expect_nothing_private();
    expect_equal(tiers.hit({1, 2, 3, 4, 5, 6, 7, 8}), arrives ? 8 : 4, "the hit of a later lease");
  }
}

// A prefix that only both tiers together have is not loaded.
void host_without_all() {
  MixedTiers tiers({1, 2});
  tiers.free_evicted(tiers.tree.evict(9, 1, 0));
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  expect(lease->hit() == 0 && lease->loadable() == 0 && lease->reach() == 8, "a prefix that no tier has in full");
  expect_equal(tiers.tree.counts(1, 1).locked, 0, "window pages locked on the host");
}

// The hook that makes room for one component may allocate the free pages of another.
void room_lost_while_loading() {
  MixedTiers tiers({0, 1, 2}, 6);
  tiers.free_evicted(tiers.tree.evict(9, 0, 0));
  const std::unique_ptr<Lease> other = tiers.open({7, 7, 7, 7});
  other->reserve(4);
  other->slide(0, 4);
  other->finish(4);
  const std::unique_ptr<Lease> lease = tiers.open({1, 2, 3, 4, 5, 6, 7, 8});
  Ids page_ids(3), windows(3);
  tiers.pools[1].allocate(3, windows.data());
  tiers.cache->evict = [&](std::uint32_t component, std::uint64_t ids, std::string_view) {
    tiers.free_evicted(tiers.tree.evict(ids, component, 0));
    if (component == 1) tiers.pools[0].allocate(3, page_ids.data());
  };
  thrown<NoPages>("a load whose pages were allocated meanwhile", [&] { lease->begin_load(); });
  expect_equal(lease->reserved(), 0, "positions reserved");
  tiers.pools[0].move(page_ids, Owner::privately, Owner::free);
  tiers.pools[1].move(windows, Owner::privately, Owner::free);
  tiers.expect_private(0, 0);
}

// ---------------------------------------------------------------- rows

// Rows of many lengths, strides and counts: the result equals a bytewise copy, and nothing else is written.
void copied_rows() {
  struct Case {
    std::size_t bytes, gap, rows, misaligned;
    bool dense;
  };
  const std::vector<Case> cases{
      {1, 0, 1, 0, true},        {7, 3, 5, 1, false},       {64, 0, 9, 0, true},       {4096, 0, 300, 0, true},
      {4096, 0, 300, 0, false},  {4096, 16, 301, 0, true},  {2047, 1, 600, 0, false},  {2100, 12, 600, 0, false},
      {4096, 16, 300, 4, false}, {2048, 16, 512, 0, false}, {300'000, 0, 6, 0, false},
  };
  Choices choose(1);
  for (const Case& c : cases) {
    const std::size_t stride = c.bytes + c.gap;
    std::vector<std::uint8_t> source(stride * c.rows + 64), target(stride * c.rows + 64, 77);
    for (std::uint8_t& byte : source)
      byte = static_cast<std::uint8_t>(choose.below(256));
    Ids from(c.rows), to(c.rows);
    std::iota(from.begin(), from.end(), 0);
    std::iota(to.begin(), to.end(), 0);
    if (!c.dense) std::reverse(to.begin(), to.end());
    to.resize(c.rows - c.rows / 4);  // some rows stay as they are
    from.resize(to.size());
    std::vector<std::uint8_t> expected = target;
    for (std::size_t i = 0; i < to.size(); ++i)
      std::copy_n(&source[c.misaligned + stride * from[i]], c.bytes, &expected[c.misaligned + stride * to[i]]);
    const Rows read{source.data() + c.misaligned, static_cast<std::ptrdiff_t>(stride)};
    const Rows write{target.data() + c.misaligned, static_cast<std::ptrdiff_t>(stride)};
    copy_rows(write, to, read, from, c.bytes);
    expect(target == expected, "rows of " + std::to_string(c.bytes) + " bytes");
  }
}

}  // namespace

// The bytes of a tree include its policy's memory, which does not grow with repeated use.
void memories() {
  for (const Policy& policy : kPolicies) {
    if (!policy.make) continue;
    Tree tree(4, 1, kFull, 1, policy.name, 1);
    Tree plain(4, 1, kFull, 1, "lru", 1);
    std::size_t bytes = 0;
    for (std::uint32_t round = 0; round < 40; ++round) {
      for (std::uint32_t page = 0; page < 20; ++page)
        for (Tree* const each : {&tree, &plain}) {
          each->match("", bytes_of(key_of({page})), false);
          insert(*each, key_of({page}), static_cast<std::int32_t>(20 * round + page));
          if (each->counts(0, 0).present > 15) each->evict(1, 0, 0);
        }
      if (round == 20) bytes = tree.bytes();
    }
    tree.check();
    expect_equal(tree.bytes(), bytes, "bytes of a tree whose policy remembers");
    expect(bytes > plain.bytes(), "a policy's memory is counted");
  }
}

// However likely a reuse is at some age, a page is worth something at all other ages, and less when it is older.
void reuse_indices() {
  for (const std::uint32_t age : {1, 17, 130, 5000}) {
    ReuseIndex index;
    for (int times = 0; times < 3000; ++times) {
      index.lived(42, 0, age);
      index.reused(42, age);
    }
    index.learn(1);
    for (int kind = 0; kind < ReuseIndex::kKinds; ++kind)
      for (int bucket = 0; bucket < ages::kBuckets; ++bucket) {
        expect(index.at(kind, bucket) > 0, "an index of a page of any age");
        if (bucket <= ages::bucket(age) + 1) continue;
        expect(index.at(kind, bucket) <= index.at(kind, bucket - 1), "older pages are not worth more");
      }
  }
}

// Runs the learning policy until it has learned: requests that share prefixes, overtake one another and decode page by
// page, with locks, backups and evictions in between.
void long_lives() {
  struct Shape {
    std::uint32_t symbol_bytes, page_size, tiers;
    std::vector<Component> rows;
  };
  const std::vector<Shape> shapes{{4, 1, 1, kFull},
                                  {8, 3, 2, kFull},
                                  {16, 4, 1, {{Kind::window, 6}}},
                                  {4, 2, 2, {{Kind::full}, {Kind::window, 4}, {Kind::state}}}};
  for (const Shape& shape : shapes) {
    Tree tree(shape.symbol_bytes, shape.page_size, shape.rows, shape.tiers, "gittins", 1);
    Choices choose(7);
    std::int32_t id = 0;
    std::vector<Handle> locked;
    std::vector<std::string> open(3);  // current requests
    const auto ids_of = [&](const Component& row, std::size_t pages) {
      Ids ids(row.per_page() ? pages : 1);
      std::iota(ids.begin(), ids.end(), id);
      id += static_cast<std::int32_t>(ids.size());
      return ids;
    };
    for (std::uint32_t step = 0; step < 4000; ++step) {
      std::string& key = open[choose.below(3)];
      if (key.empty() || choose.one_in(4)) {
        key.clear();
        const std::uint32_t set = choose.below(choose.one_in(3) ? 2000 : 12);
        for (std::uint32_t at = 0; at < shape.page_size * (1 + set % 9); ++at)
          key += symbol(at < 3 ? at : 100 * set + at, shape.symbol_bytes);
        tree.match("", bytes_of(key), false);
      } else {
        for (std::uint32_t at = 0; at < shape.page_size; ++at)
          key += symbol(1000000 + step, shape.symbol_bytes);
      }
      std::vector<Ids> ids;
      for (const Component& row : shape.rows)
        ids.push_back(ids_of(row, key.size() / tree.page_bytes()));
      const std::vector<IdSpan> spans(ids.begin(), ids.end());
      const Handle node = tree.insert("", 0, {bytes_of(key), spans}, 0, 0, true).node;
      if (choose.one_in(8)) {
        tree.lock(node, 0);
        locked.push_back(node);
      }
      if (locked.size() > 4) {
        tree.unlock(locked.front(), 0);
        locked.erase(locked.begin());
      }
      for (const Handle each : tree.lacking(node, 0, shape.tiers - 1, 2))
        if (tree.presence(each, 0, shape.tiers - 1) == Presence::absent)
          tree.attach(each, 0, shape.tiers - 1, ids_of(shape.rows[0], tree.end(each) - tree.start(each)), true);
      for (std::uint32_t tier = 0; tier < shape.tiers; ++tier) {
        const CellCounts held = tree.counts(0, tier);
        const std::uint64_t limit = 60 + 60 * tier;
        if (held.present > limit) tree.evict(held.present - limit, 0, tier);
      }
      if (step % 16 == 0) tree.check();
    }
    for (const Handle each : locked)
      tree.unlock(each, 0);
    for (std::uint32_t tier = 0; tier < shape.tiers; ++tier)
      for (std::uint32_t c = 0; c < shape.rows.size(); ++c)
        tree.evict(1000000, c, tier);
    tree.check();
    expect_equal(tree.size(), 0, "nodes left");
  }
}

// Evicting from one tier piece by piece leaves few nodes on the other.
void evicted_in_pieces() {
  for (const char* const policy : {"lru", "arc", "gittins", "tail"}) {
    Tree tree(4, 1, kFull, 2, policy, 1);
    std::string key;
    for (std::uint32_t page = 0; page < 200; ++page)
      key += symbol(page, 4);
    const Handle node = insert(tree, key, 0).node;
    Ids ids(200);
    std::iota(ids.begin(), ids.end(), 0);
    tree.attach(node, 0, 1, ids, true);
    for (int pieces = 0; pieces < 10; ++pieces)
      expect_equal(tree.evict(10, 0, 0)[0].size(), 10, "pages evicted");
    tree.check();
    expect_equal(tree.size(), 2, "nodes");
    expect_equal(tree.match("", bytes_of(key), false).host_pages, 100, "pages on the other tier");
  }
}

void run_cases() {
  reuse_indices();
  evicted_in_pieces();
  long_lives();
  bad_settings();
  bad_keys();
  bad_attachments();
  lies_on();
  pools();
  external_ranks();
  equal_ranks();
  old_generations();
  faults();
  window_boundary();
  joins();
  many_siblings();
  only_locked();
  views();
  disabled_cache();
  lease_closed_by_hook();
  lease_reserved_by_hook();
  hook_fails();
  no_page_for_a_copy();
  long_arrays();
  paths();
  gap();
  locate_splits();
  next_victims();
  memories();
  commit_joins();
  load_arrives();
  load_fails();
  load_refused();
  copy_too_late();
  no_room_to_load();
  load_of_a_closed_lease();
  loads_end_in_any_order();
  lease_closed_while_loading();
  touched_nodes();
  bad_mixtures();
  mark_at_published_node();
  mark_finds_state();
  blocked_publish_keeps_mark();
  mark_beside_state_in_flight();
  slide_without_cache();
  finish_publishes_mark();
  dropped_lease_is_freed();
  too_few_by_name();
  mixed_lease_closed_by_hook();
  only_windows();
  window_of_a_lease();
  split_below_state();
  states_on_a_path();
  thin_leaves_what_is_held();
  weighed_states();
  mixed_load_fails();
  host_without_all();
  room_lost_while_loading();
  copied_rows();
}

}  // namespace mainstem
