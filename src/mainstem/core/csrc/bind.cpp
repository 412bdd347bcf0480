// The Python face of the core. Signatures are written out for the type stub; the rules are in tree.h and pool.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <optional>

#include "pool.h"
#include "python.h"
#include "tree.h"

namespace mainstem {

using namespace nb::literals;

namespace {

Component parse_component(nb::handle row) {
  const auto kind = nb::cast<std::string>(row[0]);
  const auto window = nb::cast<std::uint32_t>(row[1]);
  if (kind == "full") return {Kind::full};
  if (kind == "state") return {Kind::state};
  if (kind == "window" && window > 0) return {Kind::window, window};
  throw BadValue{"component", kind + "(" + std::to_string(window) + ")", "full, state, or window of at least 1 symbol"};
}

std::string_view view(const nb::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}

nb::list to_list(const std::vector<Ids>& by_component) {
  nb::list arrays;
  for (const Ids& ids : by_component)
    arrays.append(to_array(ids));
  return arrays;
}

nb::tuple to_tuple(const NodeStats& s) {
  return nb::make_tuple(s.node, s.created, s.accessed, s.hits, s.priority, s.start, s.pages);
}

// The first symbols of a key, all of them by default, so that a caller need not slice it.
Bytes first_symbols(const Tree& tree, const View& key, std::optional<std::size_t> symbols) {
  const Bytes all = key.bytes();
  if (!symbols) return all;
  if (*symbols > all.size() / tree.symbol_bytes())
    throw BadValue{"symbols", std::to_string(*symbols), "at most those of the key"};
  return all.first(*symbols * tree.symbol_bytes());
}

nb::tuple match(Tree& tree, const nb::bytes& ns, nb::handle key, bool partial, std::optional<std::size_t> symbols) {
  const View bytes(key);
  const MatchResult m = tree.match(view(ns), first_symbols(tree, bytes, symbols), partial);
  std::int32_t* data = nullptr;
  nb::object ids = new_ids(m.pages, &data);
  if (m.node) tree.copy_ids(m.node, 0, 0, data);
  return nb::make_tuple(m.pages, m.partial, m.node, ids, m.partial_id, m.partial_node, m.pending_pages, m.reach_pages,
                        m.host_pages, m.host_node);
}

nb::tuple insert(Tree& tree, const nb::bytes& ns, nb::handle key, nb::sequence ids, Handle after, std::int32_t priority,
                 std::uint32_t tier, bool ready, bool verify, std::optional<std::size_t> symbols) {
  const View bytes(key);
  const std::size_t n = nb::len(ids);
  std::array<std::optional<View>, kMaxComponents> views;
  std::array<IdSpan, kMaxComponents> spans;
  for (std::size_t c = 0; c < std::min(n, kMaxComponents); ++c)
    spans[c] = views[c].emplace(ids[c]).ids();
  const InsertResult r = tree.insert(view(ns), first_symbols(tree, bytes, symbols),
                                     {spans.data(), std::min(n, kMaxComponents)}, after, priority, tier, ready, verify);
  return nb::make_tuple(r.node, r.pages, r.existing, to_array(r.ids));
}

nb::list nodes(const Tree& tree, const nb::bytes& ns) {
  nb::list out;
  for (const NodeView& n : tree.nodes(view(ns))) {
    nb::list cells;
    for (const CellView& c : n.cells)
      cells.append(nb::make_tuple(static_cast<int>(c.residency), c.locks, to_array(c.ids)));
    out.append(nb::make_tuple(to_tuple(n.stats), n.parent, n.children, nb::bytes(n.key.data(), n.key.size()), cells));
  }
  return out;
}

nb::tuple counters(const Tree& tree) {
  const Counters& c = tree.counters();
  return nb::make_tuple(c.match_calls, c.queried_symbols, c.hit_symbols, c.insert_calls, c.inserted_pages,
                        c.evicted_pages, c.splits, tree.size(), tree.namespace_count());
}

// Errors of the core become those of mainstem.errors, made with these arguments.
void raise(const char* name, nb::handle arguments) {
  const nb::object type = nb::module_::import_("mainstem.errors").attr(name);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const StaleHandle& e) {
    raise("StaleHandle",
          nb::str(("handle " + std::to_string(e.handle) + ": its node was evicted or cut short").c_str()));
  } catch (const NotLocked& e) {
    raise("NotLocked", nb::str(("handle " + std::to_string(e.handle) + " is not locked").c_str()));
  } catch (const BadValue& e) {
    raise("BadArgument", nb::make_tuple(e.name, e.value, e.allowed));
  } catch (const BadTokens& e) {
    raise("BadTokens", nb::str(e.message.c_str()));
  } catch (const WrongOwner& e) {
    raise("WrongOwner", nb::str(e.message.c_str()));
  } catch (const NoPages& e) {
    raise("OutOfPages", nb::make_tuple(e.needed, e.free, 0, e.total));
  } catch (const Corrupt& e) {
    raise("CorruptTree", nb::str(e.message.c_str()));
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() =
      "The core of Mainstem: the radix tree over bytes, and the page pool. Use mainstem.Tree and mainstem.PrefixCache.";
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // a tree may well be alive when the interpreter ends, on an engine's thread

  m.def("encode_tokens", &encode_tokens, "tokens"_a.none(), "limit"_a,
        nb::sig("def encode_tokens(tokens: object, limit: int) -> bytes"),
        "Token ids as little-endian 4-byte symbols. Raises BadTokens.");

  nb::class_<Tree>(m, "Tree", "The radix tree over bytes; see src/mainstem/core/csrc/tree.h.")
      .def(
          "__init__",
          [](Tree* self, std::uint32_t symbol_bytes, std::uint32_t page_size, nb::sequence components,
             std::uint32_t tiers, std::string_view policy, std::uint64_t hash_seed) {
            std::vector<Component> rows;
            for (nb::handle row : components)
              rows.push_back(parse_component(row));
            new (self) Tree(symbol_bytes, page_size, std::move(rows), tiers, policy, hash_seed);
          },
          "symbol_bytes"_a, "page_size"_a, "components"_a, "tiers"_a, "policy"_a, "hash_seed"_a,
          nb::sig("def __init__(self, symbol_bytes: int, page_size: int, components: "
                  "collections.abc.Sequence[tuple[str, int]], tiers: int, "
                  "policy: str, hash_seed: int) -> None"))
      .def("match", &match, "ns"_a, "key"_a, "partial"_a, "symbols"_a = nb::none(),
           nb::sig("def match(self, ns: bytes, key: bytes | bytearray, partial: bool, symbols: int | None = None) -> "
                   "tuple[int, int, int, numpy.typing.NDArray[numpy.int32], int, int, int, int, int, int]"),
           "pages, partial symbols, node, ids, partial id, partial node, pending, reach and host pages, host node.")
      .def(
          "peek",
          [](const Tree& t, const nb::bytes& ns, nb::handle key, bool partial, std::optional<std::size_t> symbols) {
            const View bytes(key);
            const PeekResult p = t.peek(view(ns), first_symbols(t, bytes, symbols), partial);
            return nb::make_tuple(p.pages, p.partial);
          },
          "ns"_a, "key"_a, "partial"_a, "symbols"_a = nb::none(),
          nb::sig("def peek(self, ns: bytes, key: bytes | bytearray, partial: bool, symbols: int | None = None) -> "
                  "tuple[int, int]"),
          "Pages, and symbols of the next one, that a match would return.")
      .def("insert", &insert, "ns"_a, "key"_a, "ids"_a, "after"_a, "priority"_a, "tier"_a, "ready"_a, "verify"_a,
           "symbols"_a = nb::none(),
           nb::sig("def insert(self, ns: bytes, key: bytes | bytearray, ids: "
                   "collections.abc.Sequence[numpy.typing.NDArray[numpy.int32]], after: int, priority: int, "
                   "tier: int, ready: bool, verify: bool, symbols: int | None = None) -> "
                   "tuple[int, int, int, numpy.typing.NDArray[numpy.int32]]"),
           "node, pages, existing pages, the tree's ids behind `after`, which `verify` compares with the key.")
      .def("lock", &Tree::lock, "node"_a, "tier"_a)
      .def("unlock", &Tree::unlock, "node"_a, "tier"_a)
      .def("move_lock", &Tree::move_lock, "from_node"_a, "to_node"_a, "tier"_a)
      .def(
          "attach",
          [](Tree& t, Handle node, std::uint32_t component, std::uint32_t tier, nb::handle ids, bool ready) {
            t.attach(node, component, tier, View(ids).ids(), ready);
          },
          "node"_a, "component"_a, "tier"_a, "ids"_a, "ready"_a,
          nb::sig("def attach(self, node: int, component: int, tier: int, ids: numpy.typing.NDArray[numpy.int32], "
                  "ready: bool) -> None"))
      .def("commit", &Tree::commit, "node"_a, "tier"_a)
      .def(
          "cancel", [](Tree& t, Handle node, std::uint32_t tier) { return to_list(t.cancel(node, tier)); }, "node"_a,
          "tier"_a, nb::sig("def cancel(self, node: int, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]"))
      .def(
          "evict",
          [](Tree& t, std::uint64_t n, std::uint32_t c, std::uint32_t tier) { return to_list(t.evict(n, c, tier)); },
          "ids"_a, "component"_a, "tier"_a,
          nb::sig("def evict(self, ids: int, component: int, tier: int) -> list[numpy.typing.NDArray[numpy.int32]]"))
      .def(
          "waiting",
          [](const Tree& t, std::uint32_t c, std::uint32_t tier) -> nb::object {
            NodeStats stats;
            if (!t.waiting(c, tier, &stats)) return nb::none();
            return to_tuple(stats);
          },
          "component"_a, "tier"_a,
          nb::sig("def waiting(self, component: int, tier: int) -> tuple[int, int, int, int, int, int, int] | None"),
          "The first candidate without a rank: node, created, accessed, hits, priority, start and number of pages.")
      .def(
          "rank",
          [](Tree& t, Handle node, std::uint32_t c, std::uint32_t tier, double major, double minor) {
            t.rank(node, c, tier, {major, minor});
          },
          "node"_a, "component"_a, "tier"_a, "major"_a, "minor"_a)
      .def("end", &Tree::end, "node"_a, "Pages from the root to the node's end.")
      .def(
          "ids",
          [](const Tree& t, Handle node, std::uint32_t component, std::uint32_t tier) {
            std::int32_t* data = nullptr;
            nb::object array = new_ids(t.end(node), &data);
            t.copy_ids(node, component, tier, data);
            return array;
          },
          "node"_a, "component"_a, "tier"_a,
          nb::sig("def ids(self, node: int, component: int, tier: int) -> numpy.typing.NDArray[numpy.int32]"),
          "Ids from the root to the node's end; -1 where the cell is absent.")
      .def(
          "namespaces",
          [](const Tree& t) {
            nb::list names;
            for (const std::string& name : t.namespaces())
              names.append(nb::bytes(name.data(), name.size()));
            return names;
          },
          nb::sig("def namespaces(self) -> list[bytes]"))
      .def(
          "nodes", &nodes, "ns"_a,
          nb::sig("def nodes(self, ns: bytes) -> list[tuple[tuple[int, int, int, int, int, int, int], int, int, bytes, "
                  "list[tuple[int, int, numpy.typing.NDArray[numpy.int32]]]]]"),
          "Depth first: stats (as in waiting), parent, children, key, and (residency, locks, ids) a cell.")
      .def(
          "counts",
          [](const Tree& t, std::uint32_t c, std::uint32_t tier) {
            const CellCounts counts = t.counts(c, tier);
            return nb::make_tuple(counts.present, counts.locked, counts.in_flight);
          },
          "component"_a, "tier"_a, nb::sig("def counts(self, component: int, tier: int) -> tuple[int, int, int]"),
          "Ids present, of these locked, and in flight.")
      .def("counters", &counters, nb::sig("def counters(self) -> tuple[int, int, int, int, int, int, int, int, int]"),
           "match calls, queried and hit symbols, insert calls, inserted and evicted pages, splits; nodes, namespaces, "
           "bytes.")
      .def("bytes", &Tree::bytes, "Memory held, in bytes; looks at every node.")
      .def("check", &Tree::check, "Raises CorruptTree, naming the node and the rule.");

  nb::class_<Pool>(m, "Pool", "Who owns each page: nobody (free), the tree (cached), or one lease (private).")
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
            if (n > pool.owned(Owner::free)) throw NoPages{n, pool.owned(Owner::free), pool.total()};
            std::int32_t* data = nullptr;
            nb::object array = new_ids(n, &data);
            pool.allocate(n, data);
            return array;
          },
          "n"_a, nb::sig("def allocate(self, n: int) -> numpy.typing.NDArray[numpy.int32]"),
          "free -> private. Raises OutOfPages.")
      .def(
          "publish", [](Pool& p, nb::handle ids) { p.move(View(ids).ids(), Owner::privately, Owner::cached); }, "ids"_a,
          nb::sig("def publish(self, ids: numpy.typing.NDArray[numpy.int32]) -> None"),
          "private -> cached. Raises WrongOwner.")
      .def(
          "release", [](Pool& p, nb::handle ids) { p.move(View(ids).ids(), Owner::privately, Owner::free); }, "ids"_a,
          nb::sig("def release(self, ids: numpy.typing.NDArray[numpy.int32]) -> None"),
          "private -> free. Raises WrongOwner.")
      .def(
          "reclaim", [](Pool& p, nb::handle ids) { p.move(View(ids).ids(), Owner::cached, Owner::free); }, "ids"_a,
          nb::sig("def reclaim(self, ids: numpy.typing.NDArray[numpy.int32]) -> None"),
          "cached -> free. Raises WrongOwner.")
      .def("owner", &Pool::owner, "page"_a, "'free', 'cached' or 'private'. Raises WrongOwner outside the pool.")
      .def(
          "check",
          [](const Pool& p) {
            if (!p.sound()) throw Corrupt{"pool: free + cached + private is every page, once"};
          },
          "Raises CorruptTree.")
      .def_prop_ro("free", [](const Pool& p) { return p.owned(Owner::free); })
      .def_prop_ro("cached", [](const Pool& p) { return p.owned(Owner::cached); })
      .def_prop_ro("private", [](const Pool& p) { return p.owned(Owner::privately); })
      .def_prop_ro("total", &Pool::total);
}

}  // namespace mainstem
