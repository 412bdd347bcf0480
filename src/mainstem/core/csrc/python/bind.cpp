// The Python bindings of the tree and the pool; tree.h and pool.h say what each method does. A text here says what form
// Python gets. A signature is spelled out for the type stub where an argument may be of any type and is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "lease/lease.h"
#include "lease/pool.h"
#include "python/bind.h"
#include "python/blake2b.h"
#include "tree/tree.h"

namespace mainstem {

using namespace nb::literals;

namespace {

constexpr std::int64_t kEverything = std::int64_t{1} << 62;
constexpr std::size_t kLongKey = 1 << 16;  // bytes; hashing at least this much releases the GIL

using Counts = std::vector<std::uint64_t>;  // ids by component

IdCounts to_counts(const Tree& tree, const Counts& room) {
  const std::size_t rows = tree.rows().size();
  if (room.size() != rows)
    throw BadValue{"room", std::to_string(room.size()) + " numbers", std::to_string(rows) + ", one for each component"};
  IdCounts counts{};
  std::copy(room.begin(), room.end(), counts.begin());
  return counts;
}
Counts to_list(const Tree& tree, const IdCounts& counts) {
  return {counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(tree.rows().size())};
}
auto to_tuple(const Tree& tree, const Retained& kept) {
  return std::tuple(kept.node, kept.pages, to_list(tree, kept.alone));
}

// Each hash covers the previous hash and the tokens of its block.
nb::bytes hash_blocks(nb::handle tokens, std::size_t block_tokens, std::size_t width, nb::handle seed) {
  const Tokens symbols(tokens, std::int64_t{1} << 31);
  symbols.check(0);
  const View key(seed);
  if (width < 1 || width > Blake2b::kMaxBytes) throw BadValue{"width", std::to_string(width), "1 to 64"};
  if (key.bytes().size() > Blake2b::kMaxBytes) throw BadValue{"seed", "too long", "at most 64 bytes"};
  if (block_tokens < 1) throw BadValue{"block_tokens", "0", "1 or more"};
  const Bytes bytes = symbols.bytes();
  const std::size_t block_bytes = block_tokens * sizeof(std::uint32_t);
  const std::size_t blocks = bytes.size() / block_bytes;
  nb::object hashes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * width)));
  if (!hashes.is_valid()) throw nb::python_error();
  auto* out = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(hashes.ptr()));
  const auto hash = [&] {
    const Blake2b keyed(width, key.bytes());
    Bytes parent;
    for (std::size_t block = 0; block < blocks; ++block, out += width) {
      Blake2b hasher = keyed;
      hasher.update(parent);
      hasher.update(bytes.subspan(block * block_bytes, block_bytes));
      hasher.finish(out);
      parent = {out, width};
    }
  };
  if (bytes.size() < kLongKey) {
    hash();
  } else {
    const nb::gil_scoped_release unlocked;
    hash();
  }
  return nb::borrow<nb::bytes>(hashes);
}

auto match(Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, bool partial) {
  const Key key(tokens, limit);
  const MatchResult m = tree.match(view(ns), key.bytes(), partial, [&](std::size_t from) { key.check(from); });
  std::int32_t* data = nullptr;
  IdArray ids = new_ids(m.pages, &data);
  if (m.node) tree.copy_ids(m.node, 0, 0, 0, data);
  const auto symbols = [&](std::uint64_t pages) { return pages * tree.page_size(); };
  return std::tuple(m.node, symbols(m.pages), ids, m.partial, m.partial_id, m.partial_node, symbols(m.pending_pages),
                    symbols(m.reach_pages), symbols(m.host_pages), m.host_node);
}

auto peek(const Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, bool partial,
          std::optional<std::int64_t> most) {
  const Key key(tokens, limit);
  const auto symbols = static_cast<std::int64_t>(key.bytes().size() / tree.symbol_bytes());
  const std::int64_t end = std::clamp(most.value_or(symbols) + (most < 0 ? symbols : 0), std::int64_t{0}, symbols);
  const Bytes bytes = key.bytes().first(static_cast<std::size_t>(end) * tree.symbol_bytes());
  const PeekResult p = tree.peek(view(ns), bytes, partial, [&](std::size_t from) { key.check(from); });
  const auto whole = [&](std::uint64_t pages) { return pages * tree.page_size(); };
  return std::tuple(whole(p.pages), p.partial, whole(p.host_pages));
}

nb::bytes continuation(const Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, std::size_t most) {
  const Key key(tokens, limit);
  key.check(0);
  return to_bytes(tree.continuation(view(ns), key.bytes(), most));
}

using Gone = std::tuple<const char*, std::uint32_t, std::uint32_t, std::int64_t, std::uint64_t, std::int64_t>;

auto explain(Tree& tree, const nb::bytes& ns, const nb::bytes& symbols, bool distances) {
  const Explanation all = tree.explain(view(ns), View(symbols).bytes(), distances);
  std::vector<std::tuple<std::uint64_t, std::uint64_t, const char*, std::optional<Gone>, std::int64_t>> runs;
  for (const Explained& run : all.runs) {
    const Departure& gone = run.departure;
    std::optional<Gone> departure;
    if (run.cause == Cause::departed)
      departure.emplace(kWhyNames[static_cast<std::size_t>(gone.why)], gone.tier, gone.hits,
                        tree.tells_recency() ? static_cast<std::int64_t>(gone.accessed) : -1, gone.gone, run.distance);
    const auto positions = [&](std::uint32_t pages) { return std::uint64_t{pages} * tree.page_size(); };
    runs.emplace_back(positions(run.begin), positions(run.end), kCauseNames[static_cast<std::size_t>(run.cause)],
                      departure, run.used);
  }
  return std::tuple(runs, all.parted, to_bytes(all.other), all.horizon);
}

auto insert(Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, const std::vector<IdArray>& ids,
            Handle after, std::int32_t priority, std::uint32_t tier, bool ready, bool past_flights) {
  const Key key(tokens, limit);
  const bool on_path = tree.lies_on(view(ns), key.bytes(), after);
  key.check(on_path ? std::size_t{tree.end(after)} * tree.page_size() : 0);
  if (!on_path) throw BadValue{"after", std::to_string(after), "a node on the path of the key, in its namespace"};
  const std::size_t pages = key.bytes().size() / tree.page_bytes();
  const std::uint32_t begin = tree.end(after);
  const std::size_t n = std::min(ids.size(), kMaxComponents);
  std::array<std::optional<View>, kMaxComponents> views;
  std::array<IdSpan, kMaxComponents> spans;
  for (std::size_t c = 0; c < n; ++c) {
    spans[c] = views[c].emplace(ids[c]).ids();
    tree.require_place(static_cast<std::uint32_t>(c), tier, spans[c]);
    if (!tree.one_id_a_page(c)) continue;
    if (spans[c].size() != pages)
      throw BadValue{"number of page ids", std::to_string(spans[c].size()),
                     "one per whole page of the key: " + std::to_string(pages)};
    spans[c] = spans[c].subspan(begin);
  }
  const Tail tail{key.bytes().subspan(std::size_t{begin} * tree.page_bytes()), {spans.data(), n}};
  const InsertResult r = tree.insert(view(ns), after, tail, priority, tier, ready, false, past_flights);
  std::int32_t* data = nullptr;
  IdArray adopted = new_ids(r.pages - begin, &data);
  tree.copy_ids(r.node, 0, tier, begin, data);
  const auto symbols = [&](std::uint64_t count) { return count * tree.page_size(); };
  return std::tuple(r.node, symbols(r.pages), symbols(r.existing), adopted);
}

// Pages that left: their hashes, the medium, and no path. Pages that came: also where they begin, the hash before them,
// the namespace and the symbols.
using Path = std::tuple<std::uint32_t, std::uint64_t, nb::bytes, nb::bytes>;
using Moves = std::vector<std::tuple<nb::bytes, std::uint32_t, std::optional<Path>>>;

Moves to_moves(const MovedPages& moved, std::uint32_t page_bytes) {
  Moves moves;
  for (const Moved& m : moved.moves) {
    std::optional<Path> path;
    if (m.stored)
      path.emplace(m.start, m.before, nb::bytes(moved.bytes.data() + m.space, m.tokens - m.space),
                   nb::bytes(moved.bytes.data() + m.tokens, m.pages * page_bytes));
    moves.emplace_back(nb::bytes(moved.hashes.data() + m.first, m.pages * sizeof(std::uint64_t)), m.medium, path);
  }
  return moves;
}

std::optional<Moves> take_moves(Tree& tree) {
  Journal& journal = tree.journal();
  std::optional<Moves> taken;
  if (!journal.lost()) taken = to_moves(journal.noted(), tree.page_bytes());
  journal.clear();
  return taken;
}

using Limits = std::vector<std::tuple<std::uint64_t, std::uint64_t>>;  // guaranteed and most, by column

Shares to_shares(const Limits& limits) {
  Shares shares;
  for (const auto& [guaranteed, maximum] : limits)
    shares.push_back({guaranteed, maximum});
  return shares;
}

template <auto method>
constexpr auto of_tree = bound<method, Tree>;

template <Owner from, Owner to>
void move(Pool& pool, IdArray ids) {
  pool.move(View(ids).ids(), from, to);
}
template <Owner owner>
std::uint64_t owned(const Pool& pool) {
  return pool.owned(owner);
}

// Translates errors of the core into those of mainstem.errors.
void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const StaleHandle& e) {
    raise_error("StaleHandle", nb::str(("handle " + std::to_string(e.handle) +
                                        ": its node was evicted, shortened or joined to the next")
                                           .c_str()));
  } catch (const NotLocked& e) {
    raise_error("NotLocked", nb::str(("handle " + std::to_string(e.handle) + " is not locked").c_str()));
  } catch (const BadValue& e) {
    raise_error("BadArgument", nb::make_tuple(e.name, e.value, e.allowed));
  } catch (const BadTokens& e) {
    raise_error("BadTokens", nb::str(e.message.c_str()));
  } catch (const WrongOwner& e) {
    raise_error("WrongOwner", nb::str(e.message.c_str()));
  } catch (const NoPages& e) {
    raise_error("OutOfPages", nb::make_tuple(e.needed, e.free, e.evictable, e.total, e.what));
  } catch (const Closed&) {
    raise_error("LeaseClosed", nb::str("the lease was finished or aborted"));
  } catch (const Corrupt& e) {
    raise_error("CorruptTree", nb::str(e.message.c_str()));
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() =
      "The core of Mainstem: the radix tree over bytes, and the page pool. Use mainstem.Tree and mainstem.PrefixCache.";
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // an engine's thread may keep a tree alive when the interpreter exits

  m.def("encode_tokens", &encode_tokens, "tokens"_a.none(), "limit"_a,
        "Encodes token ids as little-endian 4-byte symbols. Raises BadTokens.");
  m.def("hash_blocks", &hash_blocks, "tokens"_a.none(), "block_tokens"_a, "width"_a, "seed"_a,
        "As mainstem.hash_blocks, which checks its arguments.");
  m.def(
      "owner_of", [](const nb::bytes& ns) { return to_bytes(owner_of(view(ns))); }, "ns"_a,
      "As mainstem.cache.namespaces.owner_of.");

  m.def(
      "policies",
      [] {
        std::vector<std::string_view> names;
        for (const Policy& policy : kPolicies)
          if (policy.rank) names.push_back(policy.name);
        return names;
      },
      "The names of the policies that rank nodes themselves.");

  bind_counters<TreeStats>(m, "TreeStats",
                           "Counts of a tree. Pages are those of the first component on the device, unless stated "
                           "otherwise; cached = locked + evictable.");
  nb::class_<Tree>(m, "Tree", "The radix tree over bytes; see src/mainstem/core/csrc/tree/tree.h.")
      .def(
          "__init__",
          [](Tree* self, std::uint32_t symbol_bytes, std::uint32_t page_size,
             const std::vector<std::tuple<std::string, std::uint32_t, bool>>& components, std::uint32_t tiers,
             std::string_view policy, std::uint64_t hash_seed, std::uint32_t protected_hits) {
            std::vector<Component> rows;
            for (const auto& [kind, number, weighs] : components)
              rows.push_back(Component::named(kind, number, weighs));
            new (self) Tree(symbol_bytes, page_size, std::move(rows), tiers, policy, hash_seed, protected_hits);
          },
          "symbol_bytes"_a, "page_size"_a, "components"_a, "tiers"_a, "policy"_a, "hash_seed"_a,
          "protected_hits"_a = kSlruProtectedHits)
      .def("match", &match, "ns"_a, "tokens"_a.none(), "limit"_a, "partial"_a,
           "The fields of mainstem.Match. Tokens are ids below `limit`; with limit 0, symbols in bytes.")
      .def("peek", &peek, "ns"_a, "tokens"_a.none(), "limit"_a, "partial"_a, "most"_a = nb::none(),
           "Symbols that a match of the first `most` symbols would find (-1: all but one): in whole pages, in the next "
           "page, and in further whole pages when every tier counts.")
      .def("continuation", &continuation, "ns"_a, "tokens"_a.none(), "limit"_a, "most"_a)
      .def("remember", &Tree::remember, "pages"_a)
      .def("tick", &Tree::tick, "The number of matches and insertions, and of ends of leases.")
      .def("explain", &explain, "ns"_a, "symbols"_a, "distances"_a,
           "Runs of the whole pages: (begin, end, cause, departure, tick of the last use) in symbols; of a departure: "
           "why, tier, hits, ticks of the last use and of the departure, stack distance in pages; -1: not known. Then "
           "how many symbols of the last run agree with the nearest key, how that goes on, and the tick before which "
           "nothing may be known.")
      .def("insert", &insert, "ns"_a, "tokens"_a.none(), "limit"_a, "ids"_a, "after"_a, "priority"_a, "tier"_a,
           "ready"_a, "past_flights"_a = false, "The fields of mainstem.Inserted.")
      .def("remove", of_tree<&Tree::remove>, "ns"_a, "symbols"_a)
      .def("evict_removed", of_tree<&Tree::evict_removed>, "tier"_a)
      .def("removed", &Tree::removed, "node"_a)
      .def("lock", &Tree::lock, "node"_a, "tier"_a)
      .def("unlock", &Tree::unlock, "node"_a, "tier"_a)
      .def(
          "retain",
          [](Tree& t, const nb::bytes& ns, const nb::bytes& key, std::uint32_t tier, const Counts& room) {
            return to_tuple(t, t.retain(view(ns), View(key).bytes(), tier, to_counts(t, room)));
          },
          "ns"_a, "key"_a, "tier"_a, "room"_a, "Returns the node (0: nothing), its pages, and ids by component.")
      .def(
          "retain_node",
          [](Tree& t, Handle node, std::uint32_t tier, const Counts& room) {
            return to_tuple(t, t.retain(node, tier, to_counts(t, room)));
          },
          "node"_a, "tier"_a, "room"_a)
      .def(
          "end_retention",
          [](Tree& t, Handle node, std::uint32_t tier) { return to_list(t, t.end_retention(node, tier)); }, "node"_a,
          "tier"_a, "Returns ids by component. Raises NotLocked.")
      .def("demote", of_tree<&Tree::demote>, "ns"_a, "key"_a, "tiers"_a)
      .def("expect", of_tree<&Tree::expect>, "ns"_a, "key"_a, "account"_a, "now"_a, "due"_a)
      .def("note_time", &Tree::note_time, "now"_a)
      .def("path", of_tree<&Tree::path>, "ns"_a, "key"_a)
      .def(
          "attach",
          [](Tree& t, Handle node, std::uint32_t component, std::uint32_t tier, IdArray ids, bool ready) {
            const View view(ids);
            t.require_place(component, tier, view.ids());
            t.attach(node, component, tier, view.ids(), ready);
          },
          "node"_a, "component"_a, "tier"_a, "ids"_a, "ready"_a)
      .def("commit", &Tree::commit, "node"_a, "tier"_a)
      .def("cancel", of_tree<&Tree::cancel>, "node"_a, "tier"_a)
      .def(
          "evict",
          [](Tree& t, nb::handle ids, std::uint32_t component, nb::handle tier, const std::optional<nb::bytes>& ns) {
            const auto want = static_cast<std::uint64_t>(integer(ids, "pages", 0, kEverything));
            const auto from = static_cast<std::uint32_t>(integer(tier, "tier", 0, t.tiers() - 1));
            return to_python(t.evict(want, component, from, ns ? std::optional(view(*ns)) : std::nullopt));
          },
          "ids"_a.none(), "component"_a, "tier"_a.none(), "ns"_a = nb::bytes(""),
          nb::sig("def evict(self, ids: int, component: int, tier: int, ns: bytes | None = b\"\") -> "
                  "list[numpy.typing.NDArray[numpy.int32]]"))
      .def(
          "share_out",
          [](Tree& t, const Limits& others, const std::vector<std::tuple<nb::bytes, Limits>>& named) {
            std::map<std::string, Shares> shares;
            for (const auto& [name, limits] : named)
              shares.emplace(view(name), to_shares(limits));
            t.share_out(to_shares(others), shares);
          },
          "others"_a, "named"_a, "Each share by component and then by tier: guaranteed and at most so many ids.")
      .def("owner", of_tree<&Tree::owner>, "node"_a)
      .def("owners", of_tree<&Tree::owners>)
      .def("owned", of_tree<&Tree::owned>, "ns"_a, "As of `counts`, by component and then by tier.")
      .def("available", of_tree<&Tree::available>, "component"_a, "tier"_a, "ns"_a = nb::bytes(""))
      .def("beyond_maximum", of_tree<&Tree::beyond_maximum>, "component"_a, "tier"_a)
      .def("waiting", of_tree<&Tree::waiting>, "component"_a, "tier"_a,
           "The first candidate without a rank: node, created, accessed, hits, priority, start and number of pages.")
      .def(
          "rank",
          [](Tree& t, Handle node, std::uint32_t c, std::uint32_t tier, double major, double minor) {
            t.rank(node, c, tier, {major, minor});
          },
          "node"_a, "component"_a, "tier"_a, "major"_a, "minor"_a)
      .def("end", &Tree::end, "node"_a)
      .def("start", &Tree::start, "node"_a)
      .def("parent", &Tree::parent, "node"_a)
      .def("lacking", &Tree::lacking, "node"_a, "above"_a, "below"_a, "hits"_a)
      .def("locate", of_tree<&Tree::locate>, "ns"_a, "key"_a, "pages"_a)
      .def("extent", of_tree<&Tree::extent>, "ns"_a, "key"_a)
      .def("ends_or_parts", &Tree::ends_or_parts, "node"_a)
      .def("presence", of_tree<&Tree::presence>, "node"_a, "component"_a, "tier"_a,
           "0: absent, 1: in flight, 2: present.")
      .def("hot_spans", of_tree<&Tree::hot_spans>, "tier"_a, "The fields of each PathSpan.")
      .def("in_flight_above", &Tree::in_flight_above, "node"_a, "tier"_a)
      .def("own_ids", of_tree<&Tree::own_ids>, "node"_a, "component"_a, "tier"_a)
      .def("next_victim", of_tree<&Tree::next_victim>, "component"_a, "tier"_a, "want"_a = 1, "ns"_a = nb::bytes(""))
      .def("path_key", of_tree<&Tree::path_key>, "node"_a, "begin"_a = 0)
      .def(
          "ids",
          [](const Tree& t, Handle node, std::uint32_t component, std::uint32_t tier) {
            std::int32_t* data = nullptr;
            IdArray array = new_ids(t.end(node), &data);
            t.copy_ids(node, component, tier, 0, data);
            return array;
          },
          "node"_a, "component"_a, "tier"_a, "Ids from the root to the node's end; -1 where the cell is absent.")
      .def("namespaces", of_tree<&Tree::namespaces>)
      .def("nodes", of_tree<&Tree::nodes>, "ns"_a,
           "Depth first: stats (as in waiting), parent, children, whether it was removed, key, and (residency, locks, "
           "ids) for each cell.")
      .def(
          "survey",
          [](const Tree& t, std::size_t first, std::size_t count) {
            const std::vector<std::int64_t> rows = t.survey(first, count);
            return nb::bytes(rows.data(), rows.size() * sizeof(rows[0]));
          },
          "first"_a, "count"_a, "The fields of mainstem.cache.tree.SURVEYED, 8 bytes each, native.")
      .def("name_at", of_tree<&Tree::name_at>, "place"_a)
      .def("places", &Tree::places)
      .def("counts", of_tree<&Tree::counts>, "component"_a, "tier"_a,
           "Ids present, locked (of those present), and in flight.")
      .def("stats", nb::overload_cast<>(&Tree::stats, nb::const_))
      .def("listen", of_tree<&Tree::listen>, "key"_a, "places"_a, "limit"_a)
      .def(
          "take_moves", &take_moves,
          "What was noted since the last call, or None if more than `limit` pages were. Each is (hashes, medium, "
          "path): 8 bytes a page, native; the tier, 2 for storage, or 3 for what pages in storage continue and was not "
          "told to be there; path is None for pages that left, else the first page, the hash of the page before, the "
          "namespace and the symbols.")
      .def(
          "all_moves", [](Tree& t) { return to_moves(t.journal().listed(), t.page_bytes()); },
          "Everything that a match can find now, in the form of `take_moves`, parents first.")
      .def("note_written", &Tree::note_written, "node"_a, "begin"_a)
      .def("note_deleted", &Tree::note_deleted, "node"_a)
      .def("moves_dropped", [](Tree& t) { return t.journal().dropped(); })
      .def("bytes", &Tree::bytes, "Memory used, in bytes; reads every node.")
      .def("check", &Tree::check, "Raises CorruptTree with the node and the broken rule.");

  nb::class_<Pool>(m, "Pool",
                   "Tracks the owner of each page: nobody (free), the tree (cached), or one lease (private).")
      .def(
          "__init__",
          [](Pool* self, std::int64_t pages) {
            if (pages < 1 || pages > 0x7fffffff) throw BadValue{"pages", std::to_string(pages), "1 to 2147483647"};
            new (self) Pool(static_cast<std::uint32_t>(pages));
          },
          "pages"_a)
      .def(
          "allocate",
          [](Pool& pool, std::int64_t asked) {
            if (asked < 0) throw BadValue{"n", std::to_string(asked), "0 or more"};
            const auto n = static_cast<std::uint64_t>(asked);
            if (n > pool.owned(Owner::free)) throw NoPages{n, pool.owned(Owner::free), 0, pool.total()};
            std::int32_t* data = nullptr;
            IdArray array = new_ids(n, &data);
            pool.allocate(n, data);
            return array;
          },
          "n"_a, "free -> private. Raises OutOfPages.")
      .def("publish", &move<Owner::privately, Owner::cached>, "ids"_a, "private -> cached. Raises WrongOwner.")
      .def("release", &move<Owner::privately, Owner::free>, "ids"_a, "private -> free. Raises WrongOwner.")
      .def("reclaim", &move<Owner::cached, Owner::free>, "ids"_a, "cached -> free. Raises WrongOwner.")
      .def(
          "freed_with",
          [](Pool& p, nb::callable freed) {
            p.freed = [freed](IdSpan ids) { freed(to_array({ids.begin(), ids.end()})); };
          },
          "freed"_a,
          nb::sig(
              "def freed_with(self, freed: collections.abc.Callable[[numpy.typing.NDArray[numpy.int32]], object]) -> "
              "None"),
          "Calls freed(ids) from now on when pages have become free, before anybody gets them. It must not refer to "
          "the pool: nothing would end that cycle.")
      .def("owner", &Pool::owner, "page"_a, "'free', 'cached' or 'private'. Raises WrongOwner outside the pool.")
      .def(
          "check",
          [](const Pool& p) {
            if (!p.sound()) throw Corrupt{"pool: free, cached and private pages are all pages, each once"};
          },
          "Raises CorruptTree.")
      .def_prop_ro("free", &owned<Owner::free>)
      .def_prop_ro("cached", &owned<Owner::cached>)
      .def_prop_ro("private", &owned<Owner::privately>)
      .def_prop_ro("total", &Pool::total);

  bind_cache(m);
  bind_copy(m);
  bind_entropy(m);
  bind_kernels(m);
  bind_scans(m);
  bind_replay(m);
  bind_routing(m);
}

}  // namespace mainstem
