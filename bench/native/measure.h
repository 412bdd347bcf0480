// Clock, statistics and keys for the benchmark of the core, and access to the tree's memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tree.h"

namespace mainstem {

// A piece of a path as the tree stores it; floors are measured on pieces.
struct Piece {
  const std::uint8_t* key;
  std::size_t bytes;
  const std::int32_t* ids;
  std::size_t pages;
};

struct Probe {
  static std::vector<Piece> path(const Tree& tree, Handle handle) {
    std::vector<Piece> pieces;
    for (Index at = tree.resolve(handle); !tree.nodes_[at].root(); at = tree.nodes_[at].parent) {
      const Node& n = tree.nodes_[at];
      pieces.push_back({n.key.data(), n.key.size(), tree.cell(at, 0).ids.data(), n.pages});
    }
    std::reverse(pieces.begin(), pieces.end());
    return pieces;
  }
};

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<std::uint32_t>;

inline double us(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

inline double quantile(std::vector<double> values, double share) {
  const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}
inline double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}

// The cost of reading the clock twice; subtracted from calls timed one by one.
inline double clock_us() {
  std::vector<double> costs;
  for (int i = 0; i < 20000; ++i) {
    const auto begin = Clock::now();
    costs.push_back(us(Clock::now() - begin));
  }
  return median(costs);
}

template <class Call>
double timed(Call call) {
  const auto begin = Clock::now();
  call();
  return us(Clock::now() - begin);
}

// Keeps the compiler from removing unread results.
inline void use(const void* value) {
  asm volatile("" : : "r"(value) : "memory");
}

class Source {
 public:
  explicit Source(std::uint64_t seed) : engine_(seed) {}
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(engine_() % n); }
  Tokens tokens(std::size_t n) {
    Tokens tokens(n);
    for (std::uint32_t& token : tokens)
      token = below(150000);
    return tokens;
  }

 private:
  std::mt19937_64 engine_;
};

inline Bytes bytes_of(const Tokens& tokens) {
  return {reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size() * sizeof(tokens[0])};
}
inline Bytes bytes_of(const Tokens& tokens, std::size_t begin, std::size_t end) {
  return bytes_of(tokens).subspan(begin * sizeof(tokens[0]), (end - begin) * sizeof(tokens[0]));
}

// Inserts a key after a node, with consecutive page ids.
class Writer {
 public:
  explicit Writer(Tree& tree) : tree_(tree) {}
  Handle insert(Bytes key, Handle after = 0) {
    ids_.resize(key.size() / tree_.page_bytes());
    std::iota(ids_.begin(), ids_.end(), next_);
    next_ += static_cast<std::int32_t>(ids_.size());
    const IdSpan span(ids_);
    return tree_.insert("", after, {key, {&span, 1}}, 0, 0, true).node;
  }

 private:
  Tree& tree_;
  Ids ids_;
  std::int32_t next_ = 0;
};

// Prints one line of JSON for a measure.
inline void report(const char* name, const char* unit, double value) {
  std::printf("{\"name\": \"%s\", \"unit\": \"%s\", \"value\": %.6g}\n", name, unit, value);
  std::fflush(stdout);
}
inline void report(const std::string& name, const char* unit, double value) {
  report(name.c_str(), unit, value);
}

}  // namespace mainstem
