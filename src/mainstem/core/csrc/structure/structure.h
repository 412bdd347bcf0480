// Structure: the nodes of the radix tree, the links between them, and the walk along a key. It knows symbols in pages
// of bytes. It knows no page ids, no locks and no policy.
//
// A node is split or joined in two steps: first make room, which may throw, then change, which may not.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "structure/children.h"
#include "structure/errors.h"
#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

using Bytes = std::span<const std::uint8_t>;
using CheckRest = std::function<void(std::size_t)>;

struct Step {  // one node of a walk, and how many of its pages agree with the key
  Index node;
  std::uint32_t pages;
};
using Walk = std::vector<Step>;

inline std::string_view text(const Run<std::uint8_t>& run) {
  return {reinterpret_cast<const char*>(run.data()), run.size()};
}

class Structure {
 public:
  using Key = Run<std::uint8_t>;

  Structure(std::uint32_t symbol_bytes, std::uint32_t page_size, std::uint64_t seed);
  Structure(const Structure&) = delete;
  Structure& operator=(const Structure&) = delete;

  const std::uint32_t symbol_bytes, page_size, page_bytes;

  Node& operator[](Index node) { return nodes_[node]; }
  const Node& operator[](Index node) const { return nodes_[node]; }
  const Array<Node>& nodes() const { return nodes_; }  // index 0 is nobody
  std::size_t size() const { return table_.size() - roots_; }
  std::size_t roots() const { return roots_; }
  std::size_t bytes() const;
  void check() const;
  void check_node(Index node) const;

  // ---- addresses
  Handle handle(Index node) const;
  Index resolve(Handle handle) const;  // kNone for 0
  // The same for roots, too; kNone if the node is gone.
  Handle identity(Index node) const { return Handle{nodes_[node].generation} << 32 | Handle{node}; }
  Handle next_identity(Index node) const { return Handle{nodes_[node].next_generation()} << 32 | Handle{node}; }
  Index find(Handle identity) const {
    const auto node = static_cast<Index>(identity);
    return node < nodes_.size() && nodes_[node].live && this->identity(node) == identity ? node : kNone;
  }
  Index find_root(std::string_view ns) const;
  Index root_of(Index node) const;
  std::uint32_t whole_pages(Bytes key) const;
  std::string symbols(Index node, std::uint32_t begin) const;  // of pages [begin, end of the node)
  bool lies_on(std::string_view ns, Bytes key, Index node) const;

  // ---- the walk
  // The child of `parent` that begins with this page, and how many of the `pages` from there on agree.
  Step step_down(Index parent, const std::uint8_t* page, std::uint32_t pages) const;
  // The nodes along a key, as far as the tree has it. `check_rest` is called with the number of symbols that were
  // found; it may throw.
  void walk(Index root, Bytes key, std::uint32_t pages, Walk* path, const CheckRest& check_rest) const;
  // How many symbols of `tail` agree with page `page` of a node.
  std::uint32_t agreement(Index node, std::uint32_t page, Bytes tail) const;
  // A node and all below it, depth first, until `each` returns false for one. Whether it did for none.
  template <class Each>
  bool every_from(Index top, Each each) const;

  // ---- nodes come and go
  // With room in the table, and for as many nodes as room_for() says, new_node() and linking cannot fail.
  void reserve_links(std::size_t count) { table_.reserve(count); }
  std::size_t room_for(std::size_t count) const;  // for how many nodes there must be memory; 0: there is
  void reserve(std::size_t nodes) { nodes_.reserve(nodes); }
  Index new_node() noexcept;
  void add_root(Index root, Key name) noexcept;
  void add_child(Index parent, Index node, Key key) noexcept;
  void remove(Index node) noexcept;  // a node without children; then free() it
  // The node leaves the list and the table of its parent's children, and keeps its parent.
  void detach(Index node) noexcept;

  // ---- split and join
  Key::Room room_to_split(Index node, std::uint32_t pages) const {
    return nodes_[node].key.room(std::size_t{pages} * page_bytes);
  }
  void split(Index node, Index upper, std::uint32_t pages, Key::Room room) noexcept;
  // A joined node holds at most this many bytes of key, which bounds what a join moves.
  static constexpr std::size_t kJoinedBytes = 16384;
  bool may_join(Index upper, Index lower) const {
    const Node& u = nodes_[upper];
    return !u.root() && u.branches == Node::kChild && !nodes_[lower].detached &&
           u.key.size() + nodes_[lower].key.size() <= kJoinedBytes;
  }
  Key::Room room_to_join(Index lower) const {
    const Node& l = nodes_[lower];
    return nodes_[l.parent].key.room_after(l.key.size(), kJoinedBytes);
  }
  void join(Index lower, Key::Room room) noexcept;  // with its parent, which stays a node until it is freed
  void free(Index node) noexcept;
  void drop_back(Index node, std::uint32_t pages) noexcept;  // its handles go stale

 private:
  friend struct Probe;

  std::uint32_t hash(Index parent, const std::uint8_t* page) const {
    return page_hash(seed_, parent, page, page_bytes);
  }
  std::uint32_t hash(std::string_view ns) const {
    return page_hash(seed_, kNone, reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
  }
  std::uint32_t common_pages(const std::uint8_t* a, const std::uint8_t* b, std::uint32_t pages) const;
  void link(Index parent, Index node);
  void unlink(Index node);
  void note_fork(Index parent);
  void take_place(Index node, Index of);

  const std::uint64_t seed_;
  Array<Node> nodes_;
  ChildTable table_;
  Index free_ = kNone;  // the first of the free nodes, linked by `next`
  std::size_t free_count_ = 0;
  std::size_t roots_ = 0;  // of the nodes in the table
};

template <class Each>
bool Structure::every_from(Index top, Each each) const {
  for (Index at = top; at != kNone;) {
    if (!each(at)) return false;
    if (nodes_[at].first_child != kNone) {
      at = nodes_[at].first_child;
      continue;
    }
    while (at != top && nodes_[at].next == kNone)
      at = nodes_[at].parent;
    at = at == top ? kNone : nodes_[at].next;
  }
  return true;
}

// Raised by check().
[[noreturn]] inline void broken(Index node, const std::string& rule) {
  throw Corrupt{"node " + std::to_string(node) + ": " + rule};
}

}  // namespace mainstem
