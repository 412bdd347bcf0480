// Shared by the bindings: keys as passed from Python.
#pragma once

#include <optional>
#include <string_view>

#include "python.h"
#include "tree.h"

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

void bind_cache(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_replay(nb::module_& m);

}  // namespace mainstem
