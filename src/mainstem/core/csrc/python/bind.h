// Shared by the bindings: keys as passed from Python, and counters as returned to it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/python.h"
#include "tree/tree.h"

namespace mainstem {

// A key for the duration of one call: token ids below `limit`, or (limit 0) symbols, encoded and checked already.
class Key {
 public:
  Key(nb::handle tokens, std::int64_t limit) {
    if (limit)
      tokens_.emplace(tokens, limit);
    else
      view_.emplace(tokens);
  }
  Bytes bytes() const { return tokens_ ? tokens_->bytes() : view_->bytes(); }
  void check(std::size_t from) const {
    if (tokens_) tokens_->check(from);
  }

 private:
  std::optional<Tokens> tokens_;
  std::optional<View> view_;
};

inline std::string_view view(const nb::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}

inline nb::bytes to_bytes(std::string_view bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

// What Python passes where the core takes a T.
template <class T>
struct Passed {
  using Type = T;
  static T to_core(T value) { return value; }
};
template <>
struct Passed<std::string_view> {
  using Type = const nb::bytes&;
  static std::string_view to_core(const nb::bytes& bytes) { return view(bytes); }
};
template <>
struct Passed<Bytes> {
  using Type = const nb::bytes&;
  static Bytes to_core(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::uint8_t*>(bytes.c_str()), bytes.size()};
  }
};

// What Python gets where the core returns a value.
template <class T>
T to_python(T value) {
  return value;
}
inline nb::bytes to_python(const std::string& bytes) {
  return to_bytes(bytes);
}
inline nb::bytes to_python(std::string_view bytes) {
  return to_bytes(bytes);
}
inline IdArray to_python(const Ids& ids) {
  return to_array(ids);
}
inline int to_python(Presence presence) {
  return static_cast<int>(presence);
}
inline auto to_python(const NodeStats& s) {
  return std::tuple(s.node, s.created, s.accessed, s.hits, s.priority, s.start, s.pages);
}
inline auto to_python(const CellCounts& counts) {
  return std::tuple(counts.present, counts.locked, counts.in_flight);
}
template <class A, class B>
auto to_python(const std::pair<A, B>& both) {
  return std::tuple(to_python(both.first), to_python(both.second));
}
template <class T>
auto to_python(const std::vector<T>& values) {
  std::vector<decltype(to_python(values[0]))> all;
  for (const T& value : values)
    all.push_back(to_python(value));
  return all;
}

template <class T>
auto to_python(const std::optional<T>& value) {
  return value ? std::optional(to_python(*value)) : std::nullopt;
}
inline auto to_python(const PathSpan& s) {
  return std::tuple(s.from, s.at, to_bytes(s.ns), to_bytes(s.symbols));
}
inline auto to_python(const CellView& cell) {
  return std::tuple(to_python(cell.presence), cell.locks, to_python(cell.ids));
}
inline auto to_python(const NodeView& n) {
  return std::tuple(to_python(n.stats), n.parent, n.children, n.removed, to_bytes(n.key), to_python(n.cells));
}

template <class Result, class Call>
auto returned(Call call) {
  if constexpr (std::is_void_v<Result>)
    call();
  else
    return to_python(call());
}

template <auto method>
struct Bound;
template <class T, class Result, class... Arguments, Result (T::*method)(Arguments...)>
struct Bound<method> {
  template <class Self = T>
  static auto call(Self& self, typename Passed<Arguments>::Type... passed) {
    return returned<Result>([&]() -> Result { return (self.*method)(Passed<Arguments>::to_core(passed)...); });
  }
  // The same of a part.
  template <auto part, class Whole>
  static auto call_of(Whole& self, typename Passed<Arguments>::Type... passed) {
    return call(self.*part, passed...);
  }
};
template <class T, class Result, class... Arguments, Result (T::*method)(Arguments...) const>
struct Bound<method> {
  template <class Self = T>
  static auto call(const Self& self, typename Passed<Arguments>::Type... passed) {
    return returned<Result>([&]() -> Result { return (self.*method)(Passed<Arguments>::to_core(passed)...); });
  }
  template <auto part, class Whole>
  static auto call_of(const Whole& self, typename Passed<Arguments>::Type... passed) {
    return call(self.*part, passed...);
  }
};
// A method of the core for Python: bytes for names and keys, arrays for ids, tuples for records.
// `Self`: a class that Python knows, if the method is that of its base.
template <auto method, class... Self>
constexpr auto bound = &Bound<method>::template call<Self...>;

template <class Whole, class Part>
Whole* whole_of(Part Whole::*);
// A method of a part of the object that Python has.
template <auto part, auto method>
constexpr auto through = &Bound<method>::template call_of<part, std::remove_pointer_t<decltype(whole_of(part))>>;

// Binds a struct of counters (structure/counters.h). Python gets a copy, which it cannot change.
template <class Counters>
void bind_counters(nb::module_& m, const char* name, const char* text) {
  nb::class_<Counters> bound(m, name, text);
  Counters::each([&](const char* field, const char* what, auto count) { bound.def_ro(field, count, what); });
  bound
      .def(
          "as_dict",
          [](const Counters& self) {
            nb::dict counts;
            Counters::each([&](const char* field, const char*, auto count) { counts[field] = self.*count; });
            return counts;
          },
          nb::sig("def as_dict(self) -> dict[str, int]"), "All counts, by name.")
      .def("__repr__",
           [name](const Counters& self) {
             std::string shown;
             Counters::each([&](const char* field, const char*, auto count) {
               shown += (shown.empty() ? "" : ", ") + std::string(field) + "=" + std::to_string(self.*count);
             });
             return nb::str((std::string(name) + "(" + shown + ")").c_str());
           })
      .def(
          "__eq__", [](const Counters& self, const Counters& other) { return self == other; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Counters& self) {
        std::uint64_t hash = 0;
        Counters::each([&](const char*, const char*, auto count) { hash = hash * 31 + self.*count; });
        return hash;
      });
}

void bind_cache(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_entropy(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_scans(nb::module_& m);
void bind_replay(nb::module_& m);
void bind_routing(nb::module_& m);

}  // namespace mainstem
