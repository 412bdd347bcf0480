// Shared by the bindings: keys as passed from Python, and counters as returned to it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

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
void bind_replay(nb::module_& m);
void bind_routing(nb::module_& m);

}  // namespace mainstem
