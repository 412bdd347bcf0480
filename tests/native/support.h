// Shared by the native tests: expectations, a seeded source of choices, keys made of few kinds of page, and the
// contents of a tree page by page. It runs no operation of the tree.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tree/tree.h"

namespace mainstem {

// A friend of the tree that reads and breaks its memory.
struct Probe {
  static Node& node(Tree& tree, Handle handle) { return tree.nodes_[index(tree, handle)]; }
  static Node& root(Tree& tree, std::string_view ns) { return tree.nodes_[tree.nodes_.find_root(ns)]; }
  static Cell& cell(Tree& tree, Handle handle, std::size_t column) {
    return tree.cells_.cell(index(tree, handle), column);
  }
  static Cell& root_cell(Tree& tree, std::string_view ns) { return tree.cells_.cell(tree.nodes_.find_root(ns), 0); }
  static std::uint32_t& pins(Tree& tree, Handle handle) { return tree.cells_.pins_[index(tree, handle)]; }
  static std::uint32_t& retained(Tree& tree, Handle handle) {
    tree.cells_.expect_retention();
    return tree.cells_.retained_[index(tree, handle) * tree.cells_.columns];
  }
  static Order& order(Tree& tree) { return tree.eviction_.orders_[0]; }
  static CellCounts& counts(Tree& tree) { return tree.cells_.counts_[0]; }
  static Index& free(Tree& tree) { return tree.nodes_.free_; }
  static ChildTable& table(Tree& tree) { return tree.nodes_.table_; }
  static std::size_t& roots(Tree& tree) { return tree.nodes_.roots_; }
  static const Standing& standing(const Tree& tree, Handle handle, std::size_t column) {
    return tree.eviction_.standing(tree.nodes_.resolve(handle), column);
  }
  static Index index(Tree& tree, Handle handle) { return tree.nodes_.resolve(handle); }
};

struct Failure {
  std::string what;
};

inline void expect(bool good, const std::string& what, std::source_location at = std::source_location::current()) {
  if (!good) throw Failure{std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " + what};
}

inline void expect_equal(std::int64_t found, std::int64_t expected, const std::string& what,
                         std::source_location at = std::source_location::current()) {
  if (found != expected) expect(false, what + " is " + std::to_string(found) + ", not " + std::to_string(expected), at);
}

// Calls a function that must throw an Error, and returns the error.
template <class Error, class Call>
Error thrown(const std::string& what, Call call, std::source_location at = std::source_location::current()) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw Failure{std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": nothing was thrown: " + what};
}

class Choices {
 public:
  explicit Choices(std::uint64_t seed) : engine_(seed) {}
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(engine_() % n); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }
  template <class T>
  const T& of(const std::vector<T>& some) {
    return some[below(static_cast<std::uint32_t>(some.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

// Keys are strings of symbols, so that they can be found in maps.
inline Bytes bytes_of(std::string_view key) {
  return {reinterpret_cast<const std::uint8_t*>(key.data()), key.size()};
}

inline std::string symbol(std::uint32_t value, std::uint32_t symbol_bytes) {
  std::string text(symbol_bytes, '\0');
  std::memcpy(text.data(), &value, sizeof(value));
  return text;
}

// Two kinds of page, sometimes with one odd symbol: keys often share prefixes, whatever the page size.
inline std::string some_key(Choices& choose, std::uint32_t symbol_bytes, std::uint32_t page_size, std::uint32_t limit) {
  std::vector<std::uint32_t> values;
  for (std::uint32_t page = 0; page < limit; ++page)
    values.insert(values.end(), page_size, choose.one_in(3));
  if (choose.one_in(2)) values[choose.below(static_cast<std::uint32_t>(values.size()))] = 2;
  values.resize(choose.below(static_cast<std::uint32_t>(values.size()) + 1));
  std::string key;
  for (const std::uint32_t value : values)
    key += symbol(value, symbol_bytes);
  return key;
}

// A prefix of whole pages in a namespace: it names the page that it ends with.
using Path = std::pair<std::string, std::string>;

inline bool begins_with(const Path& path, const Path& beginning) {
  return path.first == beginning.first && path.second.starts_with(beginning.second);
}

struct PageCell {
  Presence presence = Presence::absent;
  std::int32_t id = -1;
  bool operator==(const PageCell&) const = default;
};
using Contents = std::map<Path, std::vector<PageCell>>;  // by component * tiers + tier; a state is at its last page

struct Use {
  std::uint32_t hits = 0;
  std::int32_t priority = 0;
};
using Uses = std::map<Path, Use>;  // of pages

// Returns the contents of a tree, regardless of its nodes; optionally also how its pages were used.
inline Contents contents_of(const Tree& tree, const std::vector<Component>& rows, std::size_t tiers,
                            Uses* uses = nullptr) {
  Contents contents;
  const std::size_t page_bytes = tree.page_bytes();
  for (const std::string& ns : tree.namespaces()) {
    std::map<Handle, std::string> keys{{0, ""}};
    for (const NodeView& node : tree.nodes(ns)) {
      std::string& key = keys[node.stats.node] = keys.at(node.parent) + node.key;
      for (std::size_t end = node.stats.start + 1; uses && end <= node.stats.start + node.stats.pages; ++end)
        (*uses)[{ns, key.substr(0, end * page_bytes)}] = {node.stats.hits, node.stats.priority};
      for (std::size_t column = 0; column < node.cells.size(); ++column) {
        const CellView& cell = node.cells[column];
        const bool per_page = rows[column / tiers].per_page();
        for (std::size_t i = 0; i < cell.ids.size(); ++i) {
          const std::size_t end = per_page ? node.stats.start + i + 1 : node.stats.start + node.stats.pages;
          std::vector<PageCell>& cells = contents[{ns, key.substr(0, end * page_bytes)}];
          cells.resize(node.cells.size());
          cells[column] = {cell.presence, cell.ids[i]};
        }
      }
    }
  }
  return contents;
}

}  // namespace mainstem
