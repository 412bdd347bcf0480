// The Python bindings of index.h and ranking.h, as one object. Events come from other processes: what is no number of
// the right size is counted as malformed, and no error.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "python/bind.h"
#include "routing/index.h"
#include "routing/ranking.h"

namespace mainstem {

using namespace nb::literals;

namespace {

constexpr std::size_t kKeyBytes = 16;
constexpr std::int64_t kTokens = std::int64_t{1} << 31;

SipKey to_key(std::string_view bytes) {
  require(bytes.size() == kKeyBytes, "bytes of the key", bytes.size(), "16");
  const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return {load_word(data), load_word(data + 8)};
}

std::span<const std::uint8_t> bytes_of(const nb::bytes& bytes) {
  return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

// Numbers from another process; none if one is no number of this size.
template <class T>
std::optional<std::vector<T>> numbers(nb::handle given) {
  std::vector<T> found;
  if (!nb::try_cast(given, found)) return std::nullopt;
  return found;
}

std::optional<LoadTime> to_load(const std::optional<std::tuple<double, double>>& given) {
  if (!given) return std::nullopt;
  return LoadTime{std::get<0>(*given), std::get<1>(*given)};
}

class PyRouting {
 public:
  PyRouting(const nb::bytes& key, std::uint32_t page_tokens, std::uint64_t capacity)
      : index(to_key(view(key)), page_tokens, capacity), ranking(page_tokens) {}
  PyRouting(const PyRouting&) = delete;
  PyRouting& operator=(const PyRouting&) = delete;

  void store(WorkerId worker, std::uint32_t medium, const nb::bytes& space, nb::handle parent, nb::handle hashes,
             nb::handle tokens) {
    const auto given = numbers<std::uint64_t>(hashes);
    const auto ids = numbers<std::uint32_t>(tokens);
    std::uint64_t before = 0;
    const bool first = parent.is_none();
    if (medium >= kMedia || !given || !ids || (!first && !nb::try_cast(parent, before))) {
      index.malformed(worker);
      return;
    }
    index.store(worker, Medium{medium}, index.space(bytes_of(space)),
                first ? std::nullopt : std::optional<std::uint64_t>(before), *given, *ids);
  }
  void remove(WorkerId worker, std::uint32_t medium, nb::handle hashes) {
    const auto given = numbers<std::uint64_t>(hashes);
    if (medium < kMedia && given)
      index.remove(worker, Medium{medium}, *given);
    else
      index.malformed(worker);
  }
  auto match(const nb::bytes& space, nb::handle tokens) {
    const Symbols symbols(tokens);
    Depths depths;
    index.match(index.space(bytes_of(space)), symbols.span(), &depths);
    return std::tuple(depths.pages[0], depths.pages[1], depths.pages[2]);
  }
  const std::vector<Estimate>& ranked(const nb::bytes& space, nb::handle tokens, nb::handle workers,
                                      std::optional<WorkerId> stay, double now_s) {
    const Symbols symbols(tokens);
    const View ids(workers);
    const IdSpan asked = ids.ids();
    for (const std::int32_t worker : asked)
      known(static_cast<WorkerId>(worker));
    const std::span<const WorkerId> among{reinterpret_cast<const WorkerId*>(asked.data()), asked.size()};
    index.expire(now_s);
    index.match(index.space(bytes_of(space)), symbols.span(), &depths_);
    return ranking.rank(depths_, symbols.length(), among, stay, now_s);
  }
  IdArray rank(const nb::bytes& space, nb::handle tokens, nb::handle workers, std::optional<WorkerId> stay,
               double now_s) {
    const std::vector<Estimate>& found = ranked(space, tokens, workers, stay, now_s);
    std::int32_t* ids = nullptr;
    IdArray out = new_ids(found.size(), &ids);
    for (const Estimate& one : found)
      *ids++ = static_cast<std::int32_t>(one.worker);
    return out;
  }
  nb::list estimates(const nb::bytes& space, nb::handle tokens, nb::handle workers, std::optional<WorkerId> stay,
                     double now_s) {
    nb::list found;
    for (const Estimate& one : ranked(space, tokens, workers, stay, now_s))
      found.append(nb::make_tuple(one.worker, one.cost_s, one.seconds, one.cached));
    return found;
  }
  void sent(WorkerId worker, const nb::bytes& space, nb::handle tokens, double now_s) {
    const Symbols symbols(tokens);
    const Digest name = index.space(bytes_of(space));
    index.match(name, symbols.span(), &depths_);
    index.expect(known(worker), name, symbols.span(), now_s);
    ranking.sent(worker, depths_, symbols.length(), now_s);
  }
  WorkerId known(WorkerId worker) const {
    require(index.known(worker), "worker", worker, "a worker that was added and not dropped");
    return worker;
  }

  RoutingIndex index;
  Ranking ranking;

 private:
  // Token ids of a prompt; unlike those of events, they must be right.
  class Symbols {
   public:
    explicit Symbols(nb::handle tokens) : tokens_(tokens, kTokens) { tokens_.check(0); }
    std::span<const std::uint32_t> span() const {
      const Bytes bytes = tokens_.bytes();
      return {reinterpret_cast<const std::uint32_t*>(bytes.data()), bytes.size() / sizeof(std::uint32_t)};
    }
    std::uint32_t length() const { return static_cast<std::uint32_t>(span().size()); }

   private:
    Tokens tokens_;
  };

  Depths depths_;  // of the last match
};

}  // namespace

void bind_routing(nb::module_& m) {
  bind_counters<IndexCounts>(m, "IndexCounts", "What a routing index holds, and what it has seen.");
  nb::class_<PyRouting>(m, "Routing",
                        "Which worker has which page, and when each would answer; see "
                        "src/mainstem/core/csrc/routing/index.h and ranking.h.")
      .def(nb::init<const nb::bytes&, std::uint32_t, std::uint64_t>(), "key"_a, "page_tokens"_a, "capacity"_a,
           "Takes a secret key of 16 bytes, the tokens of a page, and the pages of all workers together at most.")
      .def(
          "add", [](PyRouting& r) { return r.index.add(); }, "Adds a worker, and returns its number.")
      .def(
          "drop",
          [](PyRouting& r, WorkerId worker) {
            r.index.drop(worker);
            r.ranking.forget(worker);
          },
          "worker"_a, "Forgets a worker; its number may be another one's from now on.")
      .def(
          "expect_for", [](PyRouting& r, WorkerId w, double s) { r.index.expect_for(w, s); }, "worker"_a, "seconds"_a,
          "Sets how long pages that a worker was sent count as soon to be there.")
      .def(
          "share_store", [](PyRouting& r, WorkerId w, std::uint32_t store) { r.index.share_store(w, store); },
          "worker"_a, "store"_a, "Sets the store of a worker, by a number; 0: one of its own.")
      .def("store", &PyRouting::store, "worker"_a, "medium"_a, "space"_a, "parent"_a.none(), "hashes"_a.none(),
           "tokens"_a.none(),
           nb::sig("def store(self, worker: int, medium: int, space: bytes, parent: object, hashes: object, tokens: "
                   "object) -> None"),
           "Follows an event that stored pages. 0, 1, 2: device, host, storage.")
      .def("remove", &PyRouting::remove, "worker"_a, "medium"_a, "hashes"_a.none(),
           nb::sig("def remove(self, worker: int, medium: int, hashes: object) -> None"),
           "Follows an event that removed pages.")
      .def(
          "clear", [](PyRouting& r, WorkerId worker) { r.index.clear(worker); }, "worker"_a,
          "Follows an event that cleared all.")
      .def(
          "malformed", [](PyRouting& r, WorkerId worker) { r.index.malformed(worker); }, "worker"_a,
          "Counts an event that makes no sense.")
      .def("match", &PyRouting::match, "space"_a, "tokens"_a,
           nb::sig("def match(self, space: bytes, tokens: object) -> tuple[list[int], list[int], list[int]]"),
           "Returns how many pages each worker has from the beginning: on its device or expected there; there or on "
           "its host; there or in storage.")
      .def("rank", &PyRouting::rank, "space"_a, "tokens"_a, "workers"_a, "stay"_a.none(), "now_s"_a,
           nb::sig("def rank(self, space: bytes, tokens: object, workers: numpy.typing.NDArray[numpy.int32], stay: "
                   "int | None, now_s: float) -> numpy.typing.NDArray[numpy.int32]"),
           "Returns workers, the best first.")
      .def("estimates", &PyRouting::estimates, "space"_a, "tokens"_a, "workers"_a, "stay"_a.none(), "now_s"_a,
           nb::sig("def estimates(self, space: bytes, tokens: object, workers: numpy.typing.NDArray[numpy.int32], "
                   "stay: int | None, now_s: float) -> list[tuple[int, float, float, int]]"),
           "Returns the same with what they are ordered by, the seconds until a first token, and the tokens that need "
           "not be computed.")
      .def("sent", &PyRouting::sent, "worker"_a, "space"_a, "tokens"_a, "now_s"_a,
           nb::sig("def sent(self, worker: int, space: bytes, tokens: object, now_s: float) -> None"),
           "Takes into account that a request went to a worker.")
      .def(
          "ended", [](PyRouting& r, WorkerId worker, double now_s) { r.ranking.ended(r.known(worker), now_s); },
          "worker"_a, "now_s"_a, "Takes into account that a request of a worker has ended.")
      .def(
          "expire", [](PyRouting& r, double now_s) { r.index.expire(now_s); }, "now_s"_a,
          "Gives up what was expected for too long.")
      .def(
          "set_times",
          [](PyRouting& r, WorkerId worker, std::tuple<double, double> prefill, std::tuple<double, double> host,
             std::tuple<double, double> storage, std::optional<std::tuple<double, double>> peer) {
            r.ranking.set_times(r.known(worker), {std::get<0>(prefill), std::get<1>(prefill), *to_load(host),
                                                  *to_load(storage), to_load(peer)});
          },
          "worker"_a, "prefill"_a, "host"_a, "storage"_a, "peer"_a.none(),
          "Sets what a worker's time goes to, in seconds: for a token, and for each position that it attends to; then "
          "latency and time for a token of loads. No time for peers: it reads from none.")
      .def(
          "set_queue",
          [](PyRouting& r, WorkerId worker, double tokens, double now_s) {
            r.ranking.set_queue(r.known(worker), tokens, now_s);
          },
          "worker"_a, "tokens"_a, "now_s"_a, "Takes into account how many tokens a worker has still to compute.")
      .def(
          "counts", [](const PyRouting& r) { return r.index.counts(); }, "Returns the counts.")
      .def("check", [](const PyRouting& r) { r.index.check(); }, "Raises CorruptTree.");
}

}  // namespace mainstem
