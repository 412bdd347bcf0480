// The Python bindings of the cache and the lease; cache.h defines the rules.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "lease/lease.h"
#include "python/bind.h"

namespace mainstem {

using namespace nb::literals;

namespace {

std::uint64_t position(nb::handle value, const char* name,
                       std::uint64_t most = std::numeric_limits<std::int32_t>::max()) {
  return static_cast<std::uint64_t>(integer(value, name, 0, static_cast<std::int64_t>(most)));
}

struct PyCache {
  PyCache(nb::object tree, nb::tuple pools, std::int64_t token_limit, bool enabled)
      : tree(tree), pools(pools), token_limit(token_limit), cache(nb::cast<Tree&>(tree), pools_of(pools), enabled) {}

  static std::vector<Pool*> pools_of(nb::tuple pools) {
    std::vector<Pool*> found;
    for (nb::handle pool : pools)
      found.push_back(nb::cast<Pool*>(pool));
    return found;
  }

  nb::object tree, pools;    // kept alive
  nb::object evict;          // evicts instead of the tree's own order, if set
  nb::object copy_state;     // copies a state from slot to slot, if there are states
  std::int64_t token_limit;  // limit of token ids; 0: keys are symbols
  Cache cache;
};

template <auto method>
constexpr auto of_cache = through<&PyCache::cache, method>;

// A policy, and so the callback that runs it, may refer to the cache and to leases: the collector must see the cycle.
int traverse_cache(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const PyCache& cache = *nb::inst_ptr<PyCache>(self);
  Py_VISIT(cache.tree.ptr());
  Py_VISIT(cache.pools.ptr());
  Py_VISIT(cache.evict.ptr());
  Py_VISIT(cache.copy_state.ptr());
  return 0;
}

int clear_cache(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  PyCache& cache = *nb::inst_ptr<PyCache>(self);
  cache.evict.reset();
  cache.copy_state.reset();
  return 0;
}

PyType_Slot kCacheSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_cache)},
                             {Py_tp_clear, reinterpret_cast<void*>(&clear_cache)},
                             {0, nullptr}};

// Exposes a table's memory to NumPy, and keeps it alive.
struct Pages {
  Table::Memory memory;
  std::size_t size;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  if (flags & PyBUF_WRITABLE) {  // NumPy tries this first and clears the error: it needs no message
    PyErr_SetNone(PyExc_BufferError);
    return -1;
  }
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_BufferError, "this page table was not initialized");
    return -1;
  }
  const Pages& pages = *nb::inst_ptr<Pages>(self);
  return PyBuffer_FillInfo(view, self, pages.memory.get(), static_cast<Py_ssize_t>(pages.size * sizeof(std::int32_t)),
                           /*readonly=*/1, flags);
}

PyType_Slot kPagesSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)}, {0, nullptr}};

// The cache of a lease: a base of it, so that it outlives the lease.
struct KeptAlive {
  nb::object cache;
};

class PyLease : public KeptAlive, public Lease {
 public:
  PyLease(nb::handle owner, PyCache& cache, std::string_view ns, const Key& key, std::int32_t priority,
          std::uint64_t limit, bool inside)
      : KeptAlive{nb::borrow(owner)},
        Lease(cache.cache, ns, priority, key.bytes(), limit, inside, [&](std::size_t from) { key.check(from); }),
        cache_(cache) {}
  // The garbage collector may run this on any thread, at any point: the cache frees the pages at its next call.
  ~PyLease() {
    if (closed()) return;
    nb::error_scope pending;
    if (PyErr_WarnEx(PyExc_ResourceWarning, "a lease was neither finished nor aborted", 1) != 0)
      PyErr_WriteUnraisable(nullptr);
  }
  PyLease(const PyLease&) = delete;
  PyLease& operator=(const PyLease&) = delete;

  std::size_t components() const { return cache_.cache.pools.size(); }

  void append(nb::handle tokens) {
    const Key more(tokens, cache_.token_limit);
    more.check(0);
    Lease::append(more.bytes());
  }
  void reserve(nb::handle n, bool counts) {
    require_open();
    Lease::reserve(position(n, "n"), counts);
  }
  void slide(nb::handle begin, nb::handle end) {
    require_open();
    Lease::slide(position(begin, "begin"), position(end, "end"));
  }
  bool checkpoint(nb::handle at, bool room, bool mark) {
    require_open();
    return Lease::checkpoint(position(at, "position"), room, mark);
  }
  void publish(nb::handle upto) {
    require_open();
    Lease::publish(position(upto, "upto", publishable()));
  }
  void finish(nb::handle upto) {
    if (closed()) return;
    Lease::finish(upto.is_none() ? std::nullopt : std::optional(position(upto, "upto", publishable())));
  }
  auto begin_copy() {
    const std::optional<PageCopy> copy = Lease::begin_copy();
    return copy ? std::optional(std::tuple(copy->source, copy->target, copy->positions)) : std::nullopt;
  }
  auto begin_load() {
    const PageLoad load = Lease::begin_load();
    std::vector<std::tuple<IdArray, IdArray>> moves;
    for (std::size_t c = 0; c < components(); ++c)
      moves.emplace_back(to_array(load.source[c]), to_array(load.target[c]));
    return std::tuple(load.id, moves);
  }

  IdArray table(std::uint32_t component) { return view_of(Lease::table(component), &views_[component]); }
  nb::tuple tables() {
    nb::list all;
    for (std::uint32_t c = 0; c < components(); ++c)
      all.append(table(c));
    return nb::tuple(all);
  }
  // The first one besides the first component's.
  std::optional<IdArray> window_table() {
    require_open();
    for (std::uint32_t c = 1; c < components(); ++c)
      if (cache_.cache.row(c).per_page()) return table(c);
    return {};
  }

 private:
  struct View {
    IdArray array;
    const std::int32_t* memory = nullptr;
    std::size_t pages = 0;
  };
  // Returns the same array while the table is the same.
  static IdArray view_of(const Table& table, View* view) {
    if (!view->array.is_valid() || view->memory != table.memory().get() || view->pages != table.size()) {
      view->array = table.size() ? array_over(nb::cast(Pages{table.memory(), table.size()})) : to_array({});
      view->memory = table.memory().get();
      view->pages = table.size();
    }
    return view->array;
  }

  PyCache& cache_;
  std::array<View, kMaxComponents> views_;
};

int traverse_lease(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PyLease>(self)->KeptAlive::cache.ptr());
  return 0;
}

PyType_Slot kLeaseSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_lease)}, {0, nullptr}};

void make_lease(PyLease* self, nb::handle owner, const nb::bytes& ns, nb::handle tokens, nb::handle priority,
                std::optional<std::uint64_t> most, bool inside) {
  const auto rank =
      integer(priority, "priority", std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max());
  PyCache& cache = nb::cast<PyCache&>(owner);
  const Key key(tokens, cache.token_limit);
  const std::uint64_t length = key.bytes().size() / cache.cache.tree.symbol_bytes();
  if (length == 0) throw BadTokens{"the prompt is empty: a lease needs at least one position"};
  new (self) PyLease(owner, cache, view(ns), key, static_cast<std::int32_t>(rank),
                     std::min(most.value_or(length), length - 1), inside);
}

}  // namespace

void bind_cache(nb::module_& m) {
  bind_counters<LeaseCounters>(m, "LeaseCounters", "What the leases of a cache have counted.");

  nb::class_<PyCache>(m, "Cache", nb::type_slots(kCacheSlots),
                      "A tree and the pools of its pages; see src/mainstem/core/csrc/lease/cache.h.")
      .def(nb::init<nb::object, nb::tuple, std::int64_t, bool>(), "tree"_a, "pools"_a, "token_limit"_a, "enabled"_a,
           nb::sig("def __init__(self, tree: Tree, pools: tuple[Pool, ...], token_limit: int, enabled: bool) -> None"))
      .def(
          "evict_with",
          [](PyCache& self, nb::callable evict) {
            self.evict = evict;
            self.cache.evict = [&self](std::uint32_t component, std::uint64_t ids, std::string_view ns) {
              if (self.evict.is_valid()) nb::borrow(self.evict)(component, ids, nb::bytes(ns.data(), ns.size()));
            };
          },
          "evict"_a,
          nb::sig("def evict_with(self, evict: collections.abc.Callable[[int, int, bytes], object]) -> None"),
          "Calls evict(component, n, ns) from now on to free about n ids of a pool for a namespace, instead of the "
          "tree's own order.")
      .def(
          "copy_state_with",
          [](PyCache& self, nb::callable copy) {
            self.copy_state = copy;
            self.cache.copy_state = [&self](std::int32_t source, std::int32_t target) {
              if (self.copy_state.is_valid()) nb::borrow(self.copy_state)(source, target);
            };
          },
          "copy"_a, nb::sig("def copy_state_with(self, copy: collections.abc.Callable[[int, int], object]) -> None"),
          "Calls copy(source, target) from now on to copy states from slot to slot.")
      .def("take_back", of_cache<&Cache::end_abandoned>, "Ends leases that were dropped.")
      .def("settle", of_cache<&Cache::settle>)
      .def("counters", [](const PyCache& self) { return self.cache.counters; })
      .def("take_touched", of_cache<&Cache::take_touched>)
      .def_prop_ro("has_touched", of_cache<&Cache::has_touched>)
      .def("end_load", of_cache<&Cache::end_load>, "load"_a);

  nb::class_<Pages>(m, "_Pages", nb::type_slots(kPagesSlots), "The memory of a page table.");

  nb::class_<PyLease>(m, "Lease", nb::type_slots(kLeaseSlots),
                      "One sequence's hold on its prefix and on the pages it adds. Made by `PrefixCache.lease`; a "
                      "context manager. Its tables and its state, and all calls but `finish` and `abort`, raise "
                      "LeaseClosed once the lease has ended: others may own its pages by then.")
      .def("__init__", &make_lease, "cache"_a, "ns"_a, "tokens"_a.none(), "priority"_a.none(), "most"_a = nb::none(),
           "inside"_a = false,
           nb::sig("def __init__(self, cache: Cache, ns: bytes, tokens: object, priority: int, "
                   "most: int | None = None, inside: bool = False) -> None"))
      .def_prop_ro("hit", &Lease::hit, "Positions that need no compute; less than the length of the prompt.")
      .def_prop_ro("hit_tokens", &Lease::hit, "The same in tokens of the key kind.")
      .def_prop_ro("loadable", &Lease::loadable, "Positions after the hit that the host tier has.")
      .def_prop_ro("reserved", &Lease::reserved, "Positions that have a page.")
      .def_prop_ro("length", &Lease::length, "Positions of the sequence: the prompt and the appended tokens.")
      .def_prop_ro("published", &Lease::published, "Positions of this sequence that are known to be in the tree.")
      .def_prop_ro("tables", &PyLease::tables,
                   nb::sig("def tables(self) -> tuple[numpy.typing.NDArray[numpy.int32], ...]"),
                   "For each component, the page ids of the sequence, int32 [pages], the tree's first. Of a component "
                   "that does not read everything, those before what is read are -1. A state's table is empty. Read "
                   "them again after `reserve`, `slide` and `publish`.")
      .def_prop_ro(
          "page_table", [](PyLease& self) { return self.table(0); }, "The first component's table.")
      .def_prop_ro("window_table", &PyLease::window_table, "The next component's table, if it has one.")
      .def_prop_ro(
          "state", &Lease::state,
          "The slot of the recurrent state that this sequence computes with; -1 if there are no states. It starts as a "
          "copy of the tree's state at the hit; without a hit it holds garbage.")
      .def_prop_ro(
          "reach", &Lease::reach,
          "Positions that the first component alone matched; if they exceed the hit, a checkpoint there pays off.")
      .def("slide", &PyLease::slide, "begin"_a.none(), "end"_a.none(),
           nb::sig("def slide(self, begin: int, end: int) -> None"),
           "Allocates window pages for positions [begin, end), which are computed next. Frees private pages before the "
           "window of `begin`. Does nothing without a window.\n\n"
           "Raises:\n"
           "    OutOfPages: no room for more window pages; pages before the window were freed all the same: nothing "
           "reads them.\n"
           "    BadArgument: end is beyond what is reserved, or begin beyond what has window pages.")
      .def("checkpoint", &PyLease::checkpoint, "position"_a.none(), "room"_a = true, "mark"_a = false,
           nb::sig("def checkpoint(self, position: int, room: bool = True, mark: bool = False) -> bool"),
           "Copies the state of this sequence, which is at `position`. Others see the copy once the pages up to there "
           "are published. Replaces a copy that was not published.\n\n"
           "Args:\n"
           "    position: a page boundary, not before what is published.\n"
           "    room: evict another state if no slot is free.\n"
           "    mark: other sequences are expected to part from this one here, as at the end of a system prompt: a "
           "newer state of this sequence does not supersede this one.\n\n"
           "Returns whether there was a slot for it.\n\n"
           "Raises:\n"
           "    BadArgument: not a page boundary, before what is published, or beyond what is reserved.")
      .def(
          "reserve", &PyLease::reserve, "n"_a.none(), "counts"_a = true,
          nb::sig("def reserve(self, n: int, counts: bool = True) -> None"),
          "Allocates pages for n more positions, and evicts if it must. `slide` allocates those of a window. `counts`: "
          "whether the lease counts as a query of the cache.\n\n"
          "Raises:\n"
          "    OutOfPages: no room; nothing was changed.\n"
          "    BadArgument: n is negative.")
      .def("append", &PyLease::append, "tokens"_a.none(),
           "Appends decoded tokens to the sequence. O(1) per token.\n\n"
           "Raises:\n"
           "    BadTokens: a token is out of range; nothing was appended.")
      .def(
          "publish", &PyLease::publish, "upto"_a.none(), nb::sig("def publish(self, upto: int) -> None"),
          "Publishes the whole pages of positions [0, upto), which are computed: others can find them now.\n\n"
          "Pages that another lease published first are freed, and `page_table` names the tree's instead. The cost "
          "grows with the new pages, not with the prefix. Only if another lease was first is the table copied, so that "
          "views of it do not change.\n\n"
          "Raises:\n"
          "    BadArgument: upto is beyond what is reserved, or beyond the sequence.")
      .def("finish", &PyLease::finish, "upto"_a = nb::none(),
           nb::sig("def finish(self, upto: int | None = None) -> None"),
           "Publishes [0, upto), unlocks, and frees every private page. A second call does nothing.\n\n"
           "Args:\n"
           "    upto: positions whose KV is computed. None: all reserved positions, less the last one if tokens were "
           "appended, since no forward has computed the KV of a token that was just sampled.\n\n"
           "Raises:\n"
           "    BadArgument: see `publish`; the lease stays open.")
      .def("abort", &Lease::abort,
           "Unlocks and frees every private page; published pages stay. A second call does nothing.")
      .def("begin_copy", &PyLease::begin_copy,
           "Source page, target page and positions of a copy that would extend the hit; for `PrefixCache`.")
      .def("end_copy", &Lease::end_copy, "copied"_a, "Ends the copy that `begin_copy` started.")
      .def("begin_load", &PyLease::begin_load,
           "The number of the load, and for each component the host's ids and the private ids to copy them to; for the "
           "tiers.")
      .def("end_load", &Lease::end_load, "arrived"_a,
           "Ends the load that `begin_load` started; if it arrived, publishes it and adds it to the hit.")
      .def_prop_ro("closed", &Lease::closed, "Whether the lease has ended.")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> typing.Self"))
      .def(
          "__exit__", [](PyLease& self, nb::args) { self.abort(); },
          nb::sig("def __exit__(self, *error: object) -> None"));
}

}  // namespace mainstem
