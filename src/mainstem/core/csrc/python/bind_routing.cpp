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

using Pair = std::tuple<double, double>;  // seconds: to begin with and for a token

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
std::optional<std::vector<T>> numbers(nb::handle sequence) {
  std::vector<T> all;
  return nb::try_cast(sequence, all) ? std::optional(std::move(all)) : std::nullopt;
}

// Token ids of a prompt; unlike those of events, they must be right.
class Prompt {
 public:
  explicit Prompt(nb::handle tokens) : tokens_(tokens, kTokens) { tokens_.check(0); }
  std::span<const std::uint32_t> span() const {
    const Bytes bytes = tokens_.bytes();
    return {reinterpret_cast<const std::uint32_t*>(bytes.data()), bytes.size() / sizeof(std::uint32_t)};
  }
  std::uint32_t length() const { return static_cast<std::uint32_t>(span().size()); }

 private:
  Tokens tokens_;
};

// The index and the ranking, which have a worker in common.
struct Routed {
  Routed(const nb::bytes& key, std::uint32_t page_tokens, std::uint64_t capacity)
      : index(to_key(view(key)), page_tokens, capacity), ranking(page_tokens) {}
  Routed(const Routed&) = delete;
  Routed& operator=(const Routed&) = delete;

  void store(WorkerId worker, std::uint32_t medium, const nb::bytes& space, nb::handle parent, nb::handle hashes,
             nb::handle tokens) {
    const auto names = numbers<std::uint64_t>(hashes);
    const auto ids = numbers<std::uint32_t>(tokens);
    std::uint64_t before = 0;
    const bool first = parent.is_none();
    if (medium >= kMedia || !names || !ids || (!first && !nb::try_cast(parent, before))) {
      index.malformed(worker);
      return;
    }
    index.store(worker, Medium{medium}, index.space(bytes_of(space)),
                first ? std::nullopt : std::optional<std::uint64_t>(before), *names, *ids);
  }
  void remove(WorkerId worker, std::uint32_t medium, nb::handle hashes) {
    const auto names = numbers<std::uint64_t>(hashes);
    if (medium < kMedia && names)
      index.remove(worker, Medium{medium}, *names);
    else
      index.malformed(worker);
  }
  void drop(WorkerId worker) {
    index.drop(worker);
    ranking.forget(worker);
  }
  auto match(const nb::bytes& space, nb::handle tokens) {
    index.match(index.space(bytes_of(space)), Prompt(tokens).span(), &depths);
    return std::tuple(depths.pages[0], depths.pages[1], depths.pages[2]);
  }
  const std::vector<Estimate>& ranked(const nb::bytes& space, nb::handle tokens, IdArray workers,
                                      std::optional<WorkerId> stay, double now_s) {
    const Prompt prompt(tokens);
    const View ids(workers);
    const std::span<const WorkerId> among{reinterpret_cast<const WorkerId*>(ids.ids().data()), ids.ids().size()};
    for (const WorkerId worker : among)
      known(worker);
    index.expire(now_s);
    index.match(index.space(bytes_of(space)), prompt.span(), &depths);
    return ranking.rank(depths, prompt.length(), among, stay, now_s);
  }
  IdArray rank(const nb::bytes& space, nb::handle tokens, IdArray workers, std::optional<WorkerId> stay, double now_s) {
    const std::vector<Estimate>& best_first = ranked(space, tokens, workers, stay, now_s);
    std::int32_t* ids = nullptr;
    IdArray out = new_ids(best_first.size(), &ids);
    for (const Estimate& one : best_first)
      *ids++ = static_cast<std::int32_t>(one.worker);
    return out;
  }
  auto estimates(const nb::bytes& space, nb::handle tokens, IdArray workers, std::optional<WorkerId> stay,
                 double now_s) {
    std::vector<std::tuple<WorkerId, double, double, std::uint32_t>> all;
    for (const Estimate& one : ranked(space, tokens, workers, stay, now_s))
      all.emplace_back(one.worker, one.cost_s, one.seconds, one.cached);
    return all;
  }
  void sent(WorkerId worker, const nb::bytes& space, nb::handle tokens, double now_s) {
    const Prompt prompt(tokens);
    const Digest name = index.space(bytes_of(space));
    index.match(name, prompt.span(), &depths);
    index.expect(known(worker), name, prompt.span(), now_s);
    ranking.sent(worker, depths, prompt.length(), now_s);
  }
  void ended(WorkerId worker, double now_s) { ranking.ended(known(worker), now_s); }
  void check() const {
    index.check();
    ranking.check(index);
  }
  void set_times(WorkerId worker, Pair prefill, Pair host, Pair storage, const std::optional<Pair>& peer) {
    const auto load = [](const Pair& time) { return LoadTime{std::get<0>(time), std::get<1>(time)}; };
    ranking.set_times(known(worker), {std::get<0>(prefill), std::get<1>(prefill), load(host), load(storage),
                                      peer ? std::optional(load(*peer)) : std::nullopt});
  }
  void set_queue(WorkerId worker, double tokens, double now_s) { ranking.set_queue(known(worker), tokens, now_s); }
  WorkerId known(WorkerId worker) const {
    require(index.known(worker), "worker", worker, "a worker that was added and not dropped");
    return worker;
  }

  RoutingIndex index;
  Ranking ranking;
  Depths depths;  // of the last match
};

template <auto method>
constexpr auto of_index = through<&Routed::index, method>;

}  // namespace

void bind_routing(nb::module_& m) {
  bind_counters<IndexCounts>(m, "IndexCounts", "What a routing index holds, and what it has seen.");
  nb::class_<Routed>(
      m, "Routing",
      "Which worker has which page, and when each would answer; see "
      "src/mainstem/core/csrc/routing/index.h and ranking.h. Media: 0 the device, 1 the host, 2 storage.")
      .def(nb::init<const nb::bytes&, std::uint32_t, std::uint64_t>(), "key"_a, "page_tokens"_a, "capacity"_a,
           "Takes a secret key of 16 bytes, the tokens of a page, and the pages of all workers together at most.")
      .def("add", of_index<&RoutingIndex::add>)
      .def("drop", &Routed::drop, "worker"_a)
      .def("expect_for", of_index<&RoutingIndex::expect_for>, "worker"_a, "seconds"_a)
      .def("share_store", of_index<&RoutingIndex::share_store>, "worker"_a, "store"_a)
      .def("store", &Routed::store, "worker"_a, "medium"_a, "space"_a, "parent"_a.none(), "hashes"_a.none(),
           "tokens"_a.none())
      .def("remove", &Routed::remove, "worker"_a, "medium"_a, "hashes"_a.none())
      .def("clear", of_index<&RoutingIndex::clear>, "worker"_a)
      .def("malformed", of_index<&RoutingIndex::malformed>, "worker"_a)
      .def("match", &Routed::match, "space"_a, "tokens"_a, "Returns the fields of Depths.")
      .def("rank", &Routed::rank, "space"_a, "tokens"_a, "workers"_a, "stay"_a.none(), "now_s"_a,
           "Returns workers, the best first.")
      .def("estimates", &Routed::estimates, "space"_a, "tokens"_a, "workers"_a, "stay"_a.none(), "now_s"_a,
           "Returns the same with what they are ordered by, the seconds until a first token, and the tokens that need "
           "not be computed.")
      .def("sent", &Routed::sent, "worker"_a, "space"_a, "tokens"_a, "now_s"_a)
      .def("ended", &Routed::ended, "worker"_a, "now_s"_a)
      .def("expire", of_index<&RoutingIndex::expire>, "now_s"_a)
      .def("set_times", &Routed::set_times, "worker"_a, "prefill"_a, "host"_a, "storage"_a, "peer"_a.none(),
           "Each in seconds: for a token, and for each position that it attends to; then latency and time for a token.")
      .def("set_queue", &Routed::set_queue, "worker"_a, "tokens"_a, "now_s"_a)
      .def("counts", of_index<&RoutingIndex::counts>)
      .def("check", &Routed::check, "Raises CorruptTree.");
}

}  // namespace mainstem
