// The Python bindings of the core; tree.h and pool.h define the rules. A signature is spelled out for the type stub
// where an argument of any type, None included, is checked here.
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

// Ids by component.
IdCounts to_counts(const Tree& tree, const std::vector<std::uint64_t>& given) {
  const std::size_t rows = tree.rows().size();
  if (given.size() != rows)
    throw BadValue{"room", std::to_string(given.size()) + " numbers",
                   std::to_string(rows) + ", one for each component"};
  IdCounts counts{};
  std::copy(given.begin(), given.end(), counts.begin());
  return counts;
}
std::vector<std::uint64_t> to_list(const Tree& tree, const IdCounts& counts) {
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

auto hot_spans(const Tree& tree, std::uint32_t tier) {
  std::vector<std::tuple<std::int64_t, std::uint32_t, nb::bytes, nb::bytes>> out;
  for (const PathSpan& s : tree.hot_spans(tier))
    out.emplace_back(s.from, s.at, to_bytes(s.ns), to_bytes(s.symbols));
  return out;
}

nb::tuple match(Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, bool partial) {
  const Key key(tokens, limit);
  const MatchResult m = tree.match(view(ns), key.bytes(), partial, [&](std::size_t from) { key.check(from); });
  std::int32_t* data = nullptr;
  nb::object ids = new_ids(m.pages, &data);
  if (m.node) tree.copy_ids(m.node, 0, 0, 0, data);
  const auto symbols = [&](std::uint64_t pages) { return pages * tree.page_size(); };
  return nb::make_tuple(m.node, symbols(m.pages), ids, m.partial, m.partial_id, m.partial_node,
                        symbols(m.pending_pages), symbols(m.reach_pages), symbols(m.host_pages), m.host_node);
}

nb::tuple peek(const Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, bool partial,
               std::optional<std::int64_t> most) {
  const Key key(tokens, limit);
  const auto symbols = static_cast<std::int64_t>(key.bytes().size() / tree.symbol_bytes());
  const std::int64_t end = std::clamp(most.value_or(symbols) + (most < 0 ? symbols : 0), std::int64_t{0}, symbols);
  const Bytes bytes = key.bytes().first(static_cast<std::size_t>(end) * tree.symbol_bytes());
  const PeekResult p = tree.peek(view(ns), bytes, partial, [&](std::size_t from) { key.check(from); });
  const auto whole = [&](std::uint64_t pages) { return pages * tree.page_size(); };
  return nb::make_tuple(whole(p.pages), p.partial, whole(p.host_pages));
}

nb::bytes continuation(const Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, std::size_t most) {
  const Key key(tokens, limit);
  key.check(0);
  return to_bytes(tree.continuation(view(ns), key.bytes(), most));
}

// Runs of pages in symbols; see Tree::explain.
nb::tuple explain(Tree& tree, const nb::bytes& ns, const nb::bytes& symbols, bool distances) {
  const Explanation found = tree.explain(view(ns), View(symbols).bytes(), distances);
  nb::list runs;
  for (const Explained& run : found.runs) {
    const Departure& gone = run.departure;
    nb::object departure = nb::none();
    if (run.cause == Cause::departed)
      departure =
          nb::make_tuple(kWhyNames[static_cast<std::size_t>(gone.why)], gone.tier, gone.hits,
                         tree.tells_recency() ? static_cast<std::int64_t>(gone.accessed) : -1, gone.gone, run.distance);
    const auto positions = [&](std::uint32_t pages) { return std::uint64_t{pages} * tree.page_size(); };
    runs.append(nb::make_tuple(positions(run.begin), positions(run.end),
                               kCauseNames[static_cast<std::size_t>(run.cause)], departure, run.used));
  }
  return nb::make_tuple(runs, found.parted, to_bytes(found.other), found.horizon);
}

nb::tuple insert(Tree& tree, const nb::bytes& ns, nb::handle tokens, std::int64_t limit, nb::sequence ids, Handle after,
                 std::int32_t priority, std::uint32_t tier, bool ready, bool past_flights) {
  const Key key(tokens, limit);
  const bool on_path = tree.lies_on(view(ns), key.bytes(), after);
  key.check(on_path ? std::size_t{tree.end(after)} * tree.page_size() : 0);
  if (!on_path) throw BadValue{"after", std::to_string(after), "a node on the path of the key, in its namespace"};
  const std::size_t pages = key.bytes().size() / tree.page_bytes();
  const std::uint32_t begin = tree.end(after);
  const std::size_t n = std::min(nb::len(ids), kMaxComponents);
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
  nb::object adopted = new_ids(r.pages - begin, &data);
  tree.copy_ids(r.node, 0, tier, begin, data);
  const auto symbols = [&](std::uint64_t count) { return count * tree.page_size(); };
  return nb::make_tuple(r.node, symbols(r.pages), symbols(r.existing), adopted);
}

nb::list nodes(const Tree& tree, const nb::bytes& ns) {
  nb::list out;
  for (const NodeView& n : tree.nodes(view(ns))) {
    nb::list cells;
    for (const CellView& c : n.cells)
      cells.append(nb::make_tuple(static_cast<int>(c.presence), c.locks, to_array(c.ids)));
    out.append(nb::make_tuple(to_python(n.stats), n.parent, n.children, n.removed, to_bytes(n.key), cells));
  }
  return out;
}

// Each move as (hashes, medium, None) for pages that left, or (hashes, medium, (start, hash before, namespace,
// symbols)).
nb::list moves(const MovedPages& moved, std::uint32_t page_bytes) {
  nb::list out;
  for (const Moved& m : moved.moves) {
    const nb::bytes hashes(moved.hashes.data() + m.first, m.pages * sizeof(std::uint64_t));
    nb::object path = nb::none();
    if (m.stored)
      path = nb::make_tuple(m.start, m.before, nb::bytes(moved.bytes.data() + m.space, m.tokens - m.space),
                            nb::bytes(moved.bytes.data() + m.tokens, m.pages * page_bytes));
    out.append(nb::make_tuple(hashes, m.medium, path));
  }
  return out;
}

nb::object take_moves(Tree& tree) {
  Journal& journal = tree.journal();
  nb::object taken = nb::none();
  if (!journal.lost()) taken = moves(journal.noted(), tree.page_bytes());
  journal.clear();
  return taken;
}

using Limits = std::vector<std::tuple<std::uint64_t, std::uint64_t>>;

Shares to_shares(const Limits& limits) {
  Shares shares;
  for (const auto& [guaranteed, maximum] : limits)
    shares.push_back({guaranteed, maximum});
  return shares;
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
        nb::sig("def encode_tokens(tokens: object, limit: int) -> bytes"),
        "Encodes token ids as little-endian 4-byte symbols. Raises BadTokens.");
  m.def("hash_blocks", &hash_blocks, "tokens"_a.none(), "block_tokens"_a, "width"_a, "seed"_a,
        nb::sig("def hash_blocks(tokens: object, block_tokens: int, width: int, seed: bytes) -> bytes"),
        "See mainstem.hash_blocks, which checks its arguments.");

  m.def(
      "owner_of",
      [](const nb::bytes& ns) {
        const std::string_view name = owner_of(view(ns));
        return nb::bytes(name.data(), name.size());
      },
      "ns"_a, "Who owns what is in an encoded namespace; see mainstem.cache.namespaces.owner_of.");

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
           nb::sig("def match(self, ns: bytes, tokens: object, limit: int, partial: bool) -> "
                   "tuple[int, int, numpy.typing.NDArray[numpy.int32], int, int, int, int, int, int, int]"),
           "The fields of mainstem.Match. Tokens are ids below `limit`; with limit 0, symbols in bytes.")
      .def("peek", &peek, "ns"_a, "tokens"_a.none(), "limit"_a, "partial"_a, "most"_a = nb::none(),
           nb::sig("def peek(self, ns: bytes, tokens: object, limit: int, partial: bool, most: int | None = None) -> "
                   "tuple[int, int, int]"),
           "Symbols that a match of the first `most` symbols would find (-1: all but one): in whole pages, in the next "
           "page, and in further whole pages when every tier counts.")
      .def("continuation", &continuation, "ns"_a, "tokens"_a.none(), "limit"_a, "most"_a,
           nb::sig("def continuation(self, ns: bytes, tokens: object, limit: int, most: int) -> bytes"),
           "At most `most` symbols that followed a key, in the sequence used last.")
      .def("remember", &Tree::remember, "pages"_a,
           "Remembers from now on what is evicted or removed: so many pages. The tree must be empty.")
      .def("tick", &Tree::tick, "The number of matches and insertions, and of ends of leases.")
      .def("explain", &explain, "ns"_a, "symbols"_a, "distances"_a,
           nb::sig(
               "def explain(self, ns: bytes, symbols: bytes, distances: bool) -> "
               "tuple[list[tuple[int, int, str, tuple[str, int, int, int, int, int] | None, int]], int, bytes, int]"),
           "Runs of the whole pages: (begin, end, cause, departure, tick of the last use) in symbols; of a departure: "
           "why, tier, hits, ticks of the last use and of the departure, stack distance in pages; -1: not known. Then "
           "how many symbols of the last run agree with the nearest key, how that goes on, and the tick before which "
           "nothing may be known.")
      .def("insert", &insert, "ns"_a, "tokens"_a.none(), "limit"_a, "ids"_a, "after"_a, "priority"_a, "tier"_a,
           "ready"_a, "past_flights"_a = false,
           nb::sig("def insert(self, ns: bytes, tokens: object, limit: int, ids: "
                   "collections.abc.Sequence[numpy.typing.NDArray[numpy.int32]], after: int, priority: int, "
                   "tier: int, ready: bool, past_flights: bool = False) -> "
                   "tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]"),
           "The fields of mainstem.Inserted. Stops before pages in flight; with `past_flights` continues past them.")
      .def("remove", bound<&Tree::remove>, "ns"_a, "symbols"_a,
           "Removes the page that a key ends in, and everything after it. Returns the number of pages removed.")
      .def("evict_removed", bound<&Tree::evict_removed>, "tier"_a,
           "Evicts removed nodes that are neither locked nor in flight; their ids, by component.")
      .def("removed", &Tree::removed, "node"_a, "Whether a node was removed.")
      .def("lock", &Tree::lock, "node"_a, "tier"_a)
      .def("unlock", &Tree::unlock, "node"_a, "tier"_a)
      .def(
          "retain",
          [](Tree& t, const nb::bytes& ns, const nb::bytes& key, std::uint32_t tier,
             const std::vector<std::uint64_t>& room) {
            return to_tuple(t, t.retain(view(ns), View(key).bytes(), tier, to_counts(t, room)));
          },
          "ns"_a, "key"_a, "tier"_a, "room"_a,
          "Retains, on a tier, what it has by itself of a key and `room` is enough for. Returns the node where that "
          "ends (0: nothing), its pages, and the ids by component that no other retention keeps.")
      .def(
          "retain_node",
          [](Tree& t, Handle node, std::uint32_t tier, const std::vector<std::uint64_t>& room) {
            return to_tuple(t, t.retain(node, tier, to_counts(t, room)));
          },
          "node"_a, "tier"_a, "room"_a, "The same for exactly the prefix that ends at a node, or nothing.")
      .def(
          "end_retention",
          [](Tree& t, Handle node, std::uint32_t tier) { return to_list(t, t.end_retention(node, tier)); }, "node"_a,
          "tier"_a, "Ends one; returns the ids by component that no other keeps. Raises NotLocked.")
      .def("demote", bound<&Tree::demote>, "ns"_a, "key"_a, "tiers"_a,
           "What begins with a key, and of the key what no other sequence has, is evicted first on the first tiers "
           "until it is used again. Returns its nodes.")
      .def(
          "expect",
          [](Tree& t, const nb::bytes& ns, const nb::bytes& key, nb::handle account, double now, double due) {
            return t.expect(view(ns), View(key).bytes(),
                            static_cast<Account>(integer(account, "account", 1, kAccounts - 1)), now, due);
          },
          "ns"_a, "key"_a, "account"_a, "now"_a, "due"_a,
          nb::sig("def expect(self, ns: bytes, key: bytes, account: int, now: float, due: float) -> int"),
          "The sequence that begins with a key is expected to be used next at `due`; it is `now`, by any clock that "
          "never goes back. `account`: who says so. Returns the pages of the key that are there.")
      .def("tell_time", &Tree::tell_time, "now"_a, "The time, by the clock of expect().")
      .def("path", bound<&Tree::path>, "ns"_a, "key"_a,
           "The nodes along a key, from the top, as far as the tree has whole ones.")
      .def(
          "attach",
          [](Tree& t, Handle node, std::uint32_t component, std::uint32_t tier, IdArray ids, bool ready) {
            const View view(ids);
            t.require_place(component, tier, view.ids());
            t.attach(node, component, tier, view.ids(), ready);
          },
          "node"_a, "component"_a, "tier"_a, "ids"_a, "ready"_a)
      .def("commit", &Tree::commit, "node"_a, "tier"_a)
      .def("cancel", bound<&Tree::cancel>, "node"_a, "tier"_a)
      .def(
          "evict",
          [](Tree& t, nb::handle ids, std::uint32_t component, nb::handle tier, const std::optional<nb::bytes>& ns) {
            const auto want = static_cast<std::uint64_t>(integer(ids, "pages", 0, kEverything));
            const auto from = static_cast<std::uint32_t>(integer(tier, "tier", 0, t.tiers() - 1));
            return to_python(t.evict(want, component, from, ns ? std::optional(view(*ns)) : std::nullopt));
          },
          "ids"_a.none(), "component"_a, "tier"_a.none(), "ns"_a = nb::bytes(""),
          nb::sig("def evict(self, ids: int, component: int, tier: int, ns: bytes | None = b\"\") -> "
                  "list[numpy.typing.NDArray[numpy.int32]]"),
          "With shares, room is made for the owner of the namespace `ns`; None: whatever the shares are.")
      .def(
          "share_out",
          [](Tree& t, const Limits& others, const std::vector<std::tuple<nb::bytes, Limits>>& named) {
            std::map<std::string, Shares> shares;
            for (const auto& [name, limits] : named)
              shares.emplace(view(name), to_shares(limits));
            t.share_out(to_shares(others), shares);
          },
          "others"_a, "named"_a,
          nb::sig("def share_out(self, others: collections.abc.Sequence[tuple[int, int]], named: "
                  "collections.abc.Sequence[tuple[bytes, collections.abc.Sequence[tuple[int, int]]]]) -> None"),
          "Gives owners their shares, by component and then by tier: guaranteed and at most so many ids. See tree.h.")
      .def("owner", bound<&Tree::owner>, "node"_a, "Who owns a node; see `owner_of`.")
      .def("owners", bound<&Tree::owners>,
           "The owners that have anything or a share of their own, where there are shares; see `owner_of`.")
      .def("owned", bound<&Tree::owned>, "ns"_a,
           "The counts, as of `counts`, of what the owner of a namespace has, by component and then by tier.")
      .def("available", bound<&Tree::available>, "component"_a, "tier"_a, "ns"_a = nb::bytes(""),
           nb::sig("def available(self, component: int, tier: int, ns: bytes = b\"\") -> int"),
           "How many ids can be evicted for the owner of a namespace.")
      .def("beyond_maximum", bound<&Tree::beyond_maximum>, "component"_a, "tier"_a,
           "An owner that has more than its maximum, and how many ids of that can be evicted; 0: nobody has.")
      .def(
          "waiting",
          [](const Tree& t, std::uint32_t c, std::uint32_t tier) {
            NodeStats stats;
            return t.waiting(c, tier, &stats) ? std::optional(to_python(stats)) : std::nullopt;
          },
          "component"_a, "tier"_a,
          "The first candidate without a rank: node, created, accessed, hits, priority, start and number of pages.")
      .def(
          "rank",
          [](Tree& t, Handle node, std::uint32_t c, std::uint32_t tier, double major, double minor) {
            t.rank(node, c, tier, {major, minor});
          },
          "node"_a, "component"_a, "tier"_a, "major"_a, "minor"_a)
      .def("end", &Tree::end, "node"_a, "Pages from the root to the node's end.")
      .def("start", &Tree::start, "node"_a, "Pages from the root to the node's beginning.")
      .def("parent", &Tree::parent, "node"_a, "The parent of a node; 0: the root.")
      .def("lacking", &Tree::lacking, "node"_a, "above"_a, "below"_a, "hits"_a,
           "From the top, the nodes on a path that hold something on tier `above` that tier `below` lacks. Stops where "
           "`below` would get a gap, or at such a node with fewer than `hits` hits.")
      .def("locate", bound<&Tree::locate>, "ns"_a, "key"_a, "pages"_a,
           "The node that ends after the first pages of a key, split if needed; 0 if the tree does not have them.")
      .def("extent", bound<&Tree::extent>, "ns"_a, "key"_a,
           "How many pages of a key some tier has of the first component; where that may begin late, how many have "
           "nodes.")
      .def("ends_or_parts", &Tree::ends_or_parts, "node"_a, "Whether a sequence ends at a node, or others part there.")
      .def("presence", bound<&Tree::presence>, "node"_a, "component"_a, "tier"_a,
           "0: absent, 1: in flight, 2: present.")
      .def("hot_spans", &hot_spans, "tier"_a,
           "Everything present on a tier, each page once, the hottest first; see PathSpan in tree.h.")
      .def("in_flight_above", &Tree::in_flight_above, "node"_a, "tier"_a,
           "The node that names the transfer of the nearest pages in flight above a node; 0: none.")
      .def("own_ids", bound<&Tree::own_ids>, "node"_a, "component"_a, "tier"_a,
           "The node's own ids; empty unless present.")
      .def("next_victim", bound<&Tree::next_victim>, "component"_a, "tier"_a, "want"_a = 1, "ns"_a = nb::bytes(""),
           nb::sig("def next_victim(self, component: int, tier: int, want: int = 1, ns: bytes = b\"\") -> int"),
           "The node that evict() takes first of `want` ids for a namespace, or 0.")
      .def("path_key", bound<&Tree::path_key>, "node"_a, "begin"_a = 0,
           "The name of a node's namespace, and the symbols from page `begin` to the node's end.")
      .def(
          "ids",
          [](const Tree& t, Handle node, std::uint32_t component, std::uint32_t tier) {
            std::int32_t* data = nullptr;
            IdArray array = new_ids(t.end(node), &data);
            t.copy_ids(node, component, tier, 0, data);
            return array;
          },
          "node"_a, "component"_a, "tier"_a, "Ids from the root to the node's end; -1 where the cell is absent.")
      .def("namespaces", bound<&Tree::namespaces>)
      .def("nodes", &nodes, "ns"_a,
           nb::sig("def nodes(self, ns: bytes) -> list[tuple[tuple[int, int, int, int, int, int, int], int, int, bool, "
                   "bytes, list[tuple[int, int, numpy.typing.NDArray[numpy.int32]]]]]"),
           "Depth first: stats (as in waiting), parent, children, whether it was removed, key, and (residency, locks, "
           "ids) for each cell.")
      .def(
          "survey",
          [](const Tree& t, std::size_t first, std::size_t count) {
            const std::vector<std::int64_t> rows = t.survey(first, count);
            return nb::bytes(rows.data(), rows.size() * sizeof(rows[0]));
          },
          "first"_a, "count"_a,
          "The numbers of the live nodes, and roots, among `count` places from `first` on: the fields of "
          "mainstem.cache.tree.SURVEYED, 8 bytes each, native.")
      .def("name_at", bound<&Tree::name_at>, "place"_a, "The name of the namespace whose root is at a place.")
      .def("places", &Tree::places, "Places that nodes have or had; that of number 0 is nobody's.")
      .def("counts", bound<&Tree::counts>, "component"_a, "tier"_a,
           "Ids present, locked (of those present), and in flight.")
      .def(
          "stats", [](const Tree& t) { return t.stats(); }, "The counts, which are kept up to date.")
      .def(
          "listen",
          [](Tree& t, const nb::bytes& key, const std::vector<std::uint32_t>& places, std::size_t limit) {
            t.listen(view(key), places, limit);
          },
          "key"_a, "places"_a, "limit"_a,
          "Notes from now on which pages of the first component come to a tier and leave it: at most `limit` pages "
          "that nobody has taken. `places` is, by tier, the number above all page ids. The tree must be empty.")
      .def(
          "take_moves", &take_moves,
          nb::sig("def take_moves(self) -> list[tuple[bytes, int, tuple[int, int, bytes, bytes] | None]] | None"),
          "What was noted since the last call, or None if more than `limit` pages were. Each is (hashes, medium, "
          "path): 8 bytes a page, native; the tier, 2 for storage, or 3 for what pages in storage continue and was not "
          "told to be there; path is None for pages that left, else the first page, the hash of the page before, the "
          "namespace and the symbols.")
      .def(
          "all_moves", [](Tree& t) { return moves(t.journal().listed(), t.page_bytes()); },
          nb::sig("def all_moves(self) -> list[tuple[bytes, int, tuple[int, int, bytes, bytes] | None]]"),
          "Everything that a match can find now, in the form of `take_moves`, parents first.")
      .def("note_written", &Tree::note_written, "node"_a, "begin"_a,
           "Pages from `begin` to the end of a node, which the host has, are in storage from now on.")
      .def("note_deleted", &Tree::note_deleted, "node"_a, "The pages of a node were deleted from storage.")
      .def(
          "moves_dropped", [](Tree& t) { return t.journal().dropped(); }, "Pages that were noted in vain.")
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
      .def(
          "publish", [](Pool& p, IdArray ids) { p.move(View(ids).ids(), Owner::privately, Owner::cached); }, "ids"_a,
          "private -> cached. Raises WrongOwner.")
      .def(
          "release", [](Pool& p, IdArray ids) { p.move(View(ids).ids(), Owner::privately, Owner::free); }, "ids"_a,
          "private -> free. Raises WrongOwner.")
      .def(
          "reclaim", [](Pool& p, IdArray ids) { p.move(View(ids).ids(), Owner::cached, Owner::free); }, "ids"_a,
          "cached -> free. Raises WrongOwner.")
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
      .def_prop_ro("free", [](const Pool& p) { return p.owned(Owner::free); })
      .def_prop_ro("cached", [](const Pool& p) { return p.owned(Owner::cached); })
      .def_prop_ro("private", [](const Pool& p) { return p.owned(Owner::privately); })
      .def_prop_ro("total", &Pool::total);

  bind_cache(m);
  bind_copy(m);
  bind_entropy(m);
  bind_kernels(m);
  bind_replay(m);
  bind_routing(m);
}

}  // namespace mainstem
