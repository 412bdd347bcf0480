// The errors of the core. The bindings turn each into an exception of mainstem.errors.
#pragma once

#include <cstdint>
#include <string>

namespace mainstem {

using Handle = std::int64_t;  // generation << 32 | index; 0 is the root of any namespace

struct StaleHandle {
  Handle handle;
};
struct NotLocked {
  Handle handle;
};
struct BadValue {
  const char* name;
  std::string value;
  std::string allowed;
};
struct Corrupt {
  std::string message;
};

inline void require(bool good, const char* name, std::uint64_t value, const char* allowed) {
  if (!good) throw BadValue{name, std::to_string(value), allowed};
}

}  // namespace mainstem
