// The Python bindings of replay.h and optimum.h: columns of requests as arrays. A batch runs without the GIL; only
// policies written in Python take it, to choose what to evict.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/bind.h"
#include "replay/optimum.h"
#include "replay/replay.h"

namespace mainstem {

using namespace nb::literals;

namespace {

template <class T>
std::span<const T> column(const View& view, const char* name) {
  const std::span<const std::uint8_t> bytes = view.bytes();
  require(bytes.size() % sizeof(T) == 0, name, bytes.size(), "an array of items of 8 bytes");
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

// Requests of a trace: request i has blocks [offsets[i], offsets[i + 1]).
struct Requests {
  Requests(const View& offset_view, const View& block_view)
      : offsets(column<std::uint64_t>(offset_view, "offsets")), blocks(column<std::uint64_t>(block_view, "blocks")) {
    require(!offsets.empty() && offsets.front() == 0, "offsets", offsets.size(), "starting with 0");
    for (std::size_t i = 1; i < offsets.size(); ++i)
      require(offsets[i - 1] <= offsets[i] && offsets[i] - offsets[i - 1] < (1u << 28), "offsets", offsets[i],
              "non-decreasing, with fewer than 2**28 blocks per request");
    require(offsets.back() == blocks.size(), "offsets", offsets.back(), "ending with the number of blocks");
  }
  std::size_t size() const { return offsets.size() - 1; }
  Blocks of(std::size_t request) const {
    return blocks.subspan(offsets[request], offsets[request + 1] - offsets[request]);
  }

  std::span<const std::uint64_t> offsets;
  Blocks blocks;
};

// Columns of requests, and of what became of them.
struct Window {
  Window(FloatArray times, Int64Array tokens, Int64Array offsets, Uint64Array blocks,
         const std::optional<Int64Array>& stored, std::uint32_t tiers)
      : time_view(times),
        token_view(tokens),
        offset_view(offsets),
        block_view(blocks),
        requests(offset_view, block_view),
        times_s(column<double>(time_view, "times")),
        lengths(column<std::int64_t>(token_view, "tokens")) {
    require(times_s.size() == size(), "times", times_s.size(), "one per request");
    require(lengths.size() == size(), "tokens", lengths.size(), "one per request");
    if (stored) {
      in_store = column<std::int64_t>(stored_view.emplace(*stored), "stored");
      require(in_store.size() == size(), "stored", in_store.size(), "one per request");
    }
    hit_ids = new_ids(size() * tiers, &hits);
    replica_ids = new_ids(size(), &replicas);
    peer_ids = new_ids(size(), &peers);
    reach_ids = new_ids(size(), &reaches);
  }
  std::size_t size() const { return requests.size(); }
  std::uint64_t tokens(std::size_t i) const {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(0, lengths[i]));
  }
  std::uint32_t stored(std::size_t i) const {
    return in_store.empty() ? 0 : static_cast<std::uint32_t>(std::clamp<std::int64_t>(in_store[i], 0, 1 << 28));
  }
  void note(std::size_t i, const Choice& choice) {
    replicas[i] = static_cast<std::int32_t>(choice.replica);
    peers[i] = static_cast<std::int32_t>(choice.peer);
    reaches[i] = static_cast<std::int32_t>(choice.peer_reach);
  }
  auto columns() const { return std::tuple(hit_ids, replica_ids, peer_ids, reach_ids); }

  const View time_view, token_view, offset_view, block_view;
  std::optional<View> stored_view;
  const Requests requests;
  std::span<const double> times_s;
  std::span<const std::int64_t> lengths, in_store;  // no store: none
  std::int32_t *hits = nullptr, *replicas = nullptr, *peers = nullptr, *reaches = nullptr;
  IdArray hit_ids, replica_ids, peer_ids, reach_ids;
};

Replica::Evict evict_by_order(Tree* tree) {
  return [tree](std::uint64_t pages, std::uint32_t tier) { return std::move(tree->evict(pages, 0, tier)[0]); };
}

Replica::Evict evict_by_call(const std::shared_ptr<nb::object>& evict) {
  return [evict](std::uint64_t pages, std::uint32_t tier) {
    const nb::gil_scoped_acquire locked;
    const nb::object freed = (*evict)(pages, tier);
    const View view(freed[0]);
    return Ids(view.ids().begin(), view.ids().end());
  };
}

// Seconds of a token: computed, for each position that it attends to, loaded from the host, storage and a peer.
using Costs = std::tuple<double, double, double, double, std::optional<double>>;

class PyReplay {
 public:
  PyReplay(nb::sequence trees, const std::vector<std::uint64_t>& capacities, double ttl_s, const std::string& routing,
           nb::sequence evictions, std::uint32_t block_tokens, const Costs& costs, std::uint32_t parts)
      : trees_(nb::cast<std::vector<nb::object>>(trees)),
        replay_(replicas(trees, capacities, ttl_s, evictions),
                Router(parse_routing(routing), static_cast<std::uint32_t>(trees_.size()), block_tokens, times(costs)),
                parts) {}
  PyReplay(const PyReplay&) = delete;
  PyReplay& operator=(const PyReplay&) = delete;

  auto feed(FloatArray times, Int64Array tokens, Int64Array offsets, Uint64Array blocks,
            const std::optional<Int64Array>& stored) {
    Window window(times, tokens, offsets, blocks, stored, tiers());
    {
      const nb::gil_scoped_release unlocked;
      for (std::size_t i = 0; i < window.size(); ++i)
        window.note(i, replay_.serve_one(window.times_s[i], window.tokens(i), window.requests.of(i), window.stored(i),
                                         window.hits + i * tiers()));
    }
    return window.columns();
  }

  auto route(FloatArray times, Int64Array tokens, Int64Array offsets, Uint64Array blocks,
             const std::optional<Int64Array>& stored) {
    window_ = std::make_unique<Window>(times, tokens, offsets, blocks, stored, tiers());
    Window& window = *window_;
    {
      const nb::gil_scoped_release unlocked;
      if (window.size() > 0) replay_.begin(window.times_s[0]);
      for (std::size_t i = 0; i < window.size(); ++i)
        window.note(i, replay_.route(window.times_s[i], window.tokens(i), window.requests.of(i), window.stored(i)));
    }
    return window.columns();
  }

  void serve(std::uint32_t part) {
    require(part < replay_.parts(), "part", part, "below the number of parts");
    require(window_ != nullptr, "window", 0, "routed before it is served");
    const Window& window = *window_;
    const nb::gil_scoped_release unlocked;
    replay_.serve(part, {window.times_s, window.requests.offsets, window.requests.blocks,
                         std::span<const std::int32_t>(window.replicas, window.size()), window.hits});
  }

  void learn(std::uint32_t part) {
    require(part < replay_.parts(), "part", part, "below the number of parts");
    const nb::gil_scoped_release unlocked;
    replay_.learn(part);
  }

  auto totals(std::size_t replica, std::uint32_t tier) const {
    require(replica < replay_.replicas().size(), "replica", replica, "the index of a replica");
    const Replica& one = replay_.replicas()[replica];
    require(tier < one.tiers(), "tier", tier, "the index of a tier");
    const TierTotals& t = one.totals(tier);
    return std::tuple(t.hits, t.loaded, t.written, t.evicted, t.expired, shown(t.age), shown(t.idle), shown(t.age_s),
                      shown(t.idle_s));
  }

  std::size_t bytes() const { return replay_.bytes(); }

 private:
  static std::vector<Replica> replicas(nb::sequence trees, const std::vector<std::uint64_t>& capacities, double ttl_s,
                                       nb::sequence evictions) {
    const std::size_t n = nb::len(trees);
    require(n > 0 && nb::len(evictions) == n, "trees", n, "one or more, and as many evictions");
    std::vector<Replica> made;
    for (std::size_t i = 0; i < n; ++i) {
      auto* tree = nb::cast<Tree*>(trees[i]);
      const nb::object call = evictions[i];
      made.emplace_back(tree, capacities, ttl_s,
                        call.is_none() ? evict_by_order(tree) : evict_by_call(std::make_shared<nb::object>(call)));
    }
    return made;
  }
  static WorkerTimes times(const Costs& costs) {
    const auto& [token_s, attended_s, host_s, storage_s, peer_s] = costs;
    return {
        token_s, attended_s, {0, host_s}, {0, storage_s}, peer_s ? std::optional(LoadTime{0, *peer_s}) : std::nullopt};
  }
  std::uint32_t tiers() const { return replay_.replicas().front().tiers(); }
  static std::vector<std::uint64_t> shown(const Histogram& histogram) {  // without the zeros at the end
    std::vector<std::uint64_t> counts(histogram.counts.begin(), histogram.counts.end());
    while (!counts.empty() && counts.back() == 0)
      counts.pop_back();
    return counts;
  }

  std::vector<nb::object> trees_;
  Replay replay_;
  std::unique_ptr<Window> window_;  // that was routed last
};

void add(Optimum& optimum, Int64Array offsets, Uint64Array blocks) {
  const View offset_view(offsets), block_view(blocks);
  const Requests requests(offset_view, block_view);
  const nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < requests.size(); ++i)
    optimum.add(requests.of(i));
}

auto run(const Optimum& optimum, std::uint64_t capacity) {
  std::int32_t* hits = nullptr;
  IdArray hit_ids = new_ids(optimum.requests(), &hits);
  std::uint64_t evicted = 0;
  {
    const nb::gil_scoped_release unlocked;
    evicted = optimum.run(capacity, hits);
  }
  return std::tuple(hit_ids, evicted);
}

}  // namespace

void bind_replay(nb::module_& m) {
  nb::class_<PyReplay>(m, "Replay",
                       "Serves the requests of a trace with real trees, which nothing else may use from then on; see "
                       "src/mainstem/core/csrc/replay/replay.h.")
      .def(
          nb::init<nb::sequence, const std::vector<std::uint64_t>&, double, const std::string&, nb::sequence,
                   std::uint32_t, const Costs&, std::uint32_t>(),
          "trees"_a, "capacities"_a, "ttl_s"_a, "routing"_a, "evictions"_a, "block_tokens"_a, "costs"_a, "parts"_a,
          nb::sig("def __init__(self, trees: collections.abc.Sequence[Tree], capacities: "
                  "collections.abc.Sequence[int], ttl_s: float, routing: str, evictions: "
                  "collections.abc.Sequence[collections.abc.Callable[[int, int], "
                  "list[numpy.typing.NDArray[numpy.int32]]] | None], block_tokens: int, costs: "
                  "tuple[float, float, float, float, float | None], parts: int) -> None"),
          "Takes one tree per replica and one capacity per tier. For policies written in Python, evict(pages, tier) "
          "evicts. Costs: seconds of a token, of a position that it attends to, of a token from the host, from storage "
          "and from another replica; None: replicas read nothing from each other. Parts: how many threads may serve.")
      .def("feed", &PyReplay::feed, "times_s"_a, "tokens"_a, "offsets"_a, "blocks"_a, "stored"_a = nb::none(),
           "Serves requests, one after another; a store that all replicas share has the first `stored` blocks of each. "
           "Returns the blocks that each hit, [requests * tiers], the replica that served it, the peer that it asks, "
           "and the blocks from the first that the peer holds; 0: it asks none.")
      .def("route", &PyReplay::route, "times_s"_a, "tokens"_a, "offsets"_a, "blocks"_a, "stored"_a = nb::none(),
           "Routes requests by what was learned so far. Returns the same columns; `serve` fills in the hits.")
      .def("serve", &PyReplay::serve, "part"_a,
           "Serves the requests that were routed last to the replicas of a part, each part once; from any thread.")
      .def("learn", &PyReplay::learn, "part"_a,
           "After all parts have served: learns a part of what changed; from any thread.")
      .def("totals", &PyReplay::totals, "replica"_a, "tier"_a,
           "Blocks hit, loaded, written, evicted and expired; age and idle time of evicted blocks, in accesses and in "
           "seconds: [0] counts zeros, [i] counts numbers in [2**(i-1), 2**i).")
      .def("bytes", &PyReplay::bytes, "Memory used beside the trees.");

  nb::class_<Optimum>(m, "Optimum", "The offline optimum; see src/mainstem/core/csrc/replay/optimum.h.")
      .def(nb::init<>())
      .def("add", &add, "offsets"_a, "blocks"_a, "Adds the next requests.")
      .def("finish", &Optimum::finish, "Ends the trace: `run` may be called now, from several threads.")
      .def("run", &run, "capacity"_a, "Returns the blocks that each request hits, and the number of blocks evicted.");
}

}  // namespace mainstem
