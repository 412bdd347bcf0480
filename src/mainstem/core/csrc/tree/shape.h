// TreeShape: the three parts of a tree, and every change that concerns more than one of them. Structure knows keys,
// Residency ids, Eviction ranks; none calls another that lies higher here.
//
//   TreeShape    changes all three: cells are filled and emptied; nodes come, are split, joined, detached and freed
//   Eviction     which goes first; reads the other two, and writes what ranks a node
//   Residency    which ids, and what holds them; reads the structure
//   Structure    which nodes, and where
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "eviction/eviction.h"
#include "residency/residency.h"
#include "structure/counters.h"
#include "structure/structure.h"
#include "tree/ghosts.h"
#include "tree/journal.h"

namespace mainstem {

#define MAINSTEM_TREE_COUNTERS(COUNT)                                                       \
  COUNT(match_calls, "Matches.")                                                            \
  COUNT(queried_symbols, "Symbols that matches looked up.")                                 \
  COUNT(hit_symbols, "Symbols that matches found on the device.")                           \
  COUNT(insert_calls, "Insertions.")                                                        \
  COUNT(inserted_pages, "Pages of the first component that insertions added, on any tier.") \
  COUNT(evicted_pages, "Pages and slots evicted, on any tier.")                             \
  COUNT(splits, "Nodes split.")
MAINSTEM_COUNTERS(TreeCounters, NoCounters, MAINSTEM_TREE_COUNTERS);

class TreeShape {
 public:
  TreeShape(std::uint32_t symbol_bytes, std::uint32_t page_size, std::vector<Component> components, std::uint32_t tiers,
            std::string_view policy, std::uint64_t hash_seed, std::uint32_t protected_hits = kSlruProtectedHits);
  TreeShape(const TreeShape&) = delete;
  TreeShape& operator=(const TreeShape&) = delete;

 protected:
  // ---- nodes
  // Makes room for `count` new nodes, so that creating them, linking them and filling their cells cannot fail.
  void reserve(std::size_t count);
  Index make_root(std::string_view ns);
  void disown(Index node) noexcept;                                                   // it was removed
  Index add_child(Index parent, Structure::Key key, std::int32_t priority) noexcept;  // reserve() first
  Index split(Index node, std::uint32_t pages);  // after its first pages; the new upper half
  // Makes a node on the path to `node` end before a page.
  void split_at(Index node, std::uint32_t page);
  void split_at_window(Index node, std::size_t column);
  void join(Index lower) noexcept;  // with its parent, if nobody can tell
  // A lock that ended at this node is gone, or a cell: joins the node to its only child, if it has one.
  void release_boundary(Index node) noexcept {
    if (nodes_[node].branches == Node::kChild) join(nodes_[node].first_child);
  }
  // Joins the node before the window that ends at a node, if that is possible now.
  void join_before_window(Index node, std::size_t column) noexcept;
  // Frees a node that holds nothing, and every ancestor that is then empty, too; a root goes with its last child.
  void reap(Index node) noexcept;
  // Removes nodes and all below them, none of which is below another. Returns the number of pages.
  std::uint64_t detach(const std::vector<Index>& tops, Why why);

  // ---- cells
  void occupy(Index node, std::size_t column, Run<std::int32_t>&& ids, Index transfer) noexcept {
    cells_.occupy(node, column, std::move(ids), transfer);
    eviction_.came(node, column);
    if (journal_) [[unlikely]]
      journal_->came(node, column);
  }
  Run<std::int32_t> vacate(Index node, std::size_t column) noexcept {
    const bool present = cells_.cell(node, column).present();
    Run<std::int32_t> ids = cells_.vacate(node, column);
    eviction_.gone(node, column, present);
    if (journal_ && present) [[unlikely]]
      journal_->left(node, column, {ids.data(), ids.size()});
    return ids;
  }
  void vacate_into(Index node, std::size_t column, Ids* freed);  // which has room
  void arrive(Index node, std::size_t column) noexcept {
    cells_.arrive(node, column);
    eviction_.arrived(node, column);
    if (journal_) [[unlikely]]
      journal_->arrived(node, column);
  }
  void lock_path(Index node, Index stop, std::size_t column, int by) {
    cells_.lock_path(node, stop, column, by, [&](Index changed) { eviction_.refresh(changed, column); });
  }
  void note_leaving(Index node) noexcept;
  // A lock, or a transfer in flight, holds all components of a prefix on one tier.
  void lock_all(Index node, std::uint32_t tier, int by);

  Structure nodes_;
  Residency cells_;
  Eviction eviction_;
  TreeCounters counters_;
  std::unique_ptr<Journal> journal_;  // none: nobody listens
  std::unique_ptr<Ghosts> ghosts_;    // none: what is gone is not remembered
  const std::uint64_t seed_;
};

}  // namespace mainstem
