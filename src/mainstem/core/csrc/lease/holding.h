// Holdings: what a lease holds of each component, one kind for each way in which ids move.
//
//   Paged       full attention       an id for each page, to the end
//   Sliding     windows, chunks      an id for each page that is still read, -1 for those before
//   StateSlot   recurrent states     the slot that the sequence computes with, and a copy to be published
//
//   page    0 ........ owned ........ size       The tree owns the ids before `owned`, the lease those after.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "lease/table.h"
#include "residency/component.h"
#include "tree/tree.h"

namespace mainstem {

class Cache;
class Lease;

// Copies from the host into private pages and slots of a lease: by component, source[i] to target[i].
struct PageLoad {
  std::uint64_t id = 0;  // never 0
  std::array<Ids, kMaxComponents> source, target;
};

// Pages [owned, end) have become the tree's, under `node`. From `existing` on it has ours; before it may have its own.
struct Adoption {
  Handle node;
  std::uint32_t owned, end, existing;
};

class Paged {
 public:
  explicit Paged(std::uint32_t component_) : component(component_) {}

  void take(const Cache& cache, Handle node, std::uint32_t owned);  // what a match found; the table has room
  void free(Cache& cache, std::size_t owned);
  // Allocates memory for adopt(): a table that names the tree's pages instead.
  void prepare_adoption() { spare_ = table.copy(table.room()); }
  void adopt(Cache& cache, const Adoption& adoption);

  // The first page that a load up to `end` brings.
  std::uint32_t load_from(const Cache& cache, std::uint32_t owned, std::uint32_t end) const;
  void prepare_load(Lease& lease, std::uint32_t end, PageLoad* load);
  void begin_load(Cache& cache, std::uint32_t owned, std::uint32_t end, PageLoad* load);

  std::uint32_t component;
  Table table;

 private:
  Table::Memory spare_;
};

class Sliding : public Paged {
 public:
  using Paged::Paged;

  void take(Cache& cache, Handle node, std::uint32_t owned);
  void prepare_adoption(std::uint32_t pages);
  void adopt(Cache& cache, const Adoption& adoption);
  void revert_load(Cache& cache, Handle node, std::uint32_t owned);
  // Entries before page `first` are not read any more: frees the private ones.
  void drop_before(Cache& cache, std::uint32_t first, std::uint32_t owned);
  void drop_before_end(Cache& cache, std::uint32_t owned);  // what a sequence of `owned` pages does not read

 private:
  std::uint32_t front_ = 0;  // entries before this one are -1
  Ids theirs_;
};

class StateSlot {
 public:
  explicit StateSlot(std::uint32_t component_) : component(component_) {}

  // Allocates a slot with a copy of the tree's state at the end of the match. The tree's own state is never modified.
  void take(Lease& lease);
  void free(Cache& cache);
  // Copies the state after `pages` pages, to be published. Without `room`, uses a free slot only. Whether there was
  // one.
  bool checkpoint(Lease& lease, std::uint32_t pages, bool room, bool mark);
  // Hands the copy to the tree, which may have one there already.
  void adopt(Cache& cache, Handle node, std::uint32_t owned);

  void prepare_load(Lease& lease, std::uint32_t end, PageLoad* load);
  void begin_load(Cache& cache, std::uint32_t end, PageLoad* load);
  void revert_load(Cache& cache, Handle node, std::uint32_t owned);

  std::uint32_t component;
  std::int32_t slot = -1;  // the sequence computes with it
  std::int32_t copy = -1;  // the state after `copy_pages` pages
  std::uint32_t copy_pages = 0;
  bool copy_marked = false;  // other sequences are expected to part there

 private:
  std::int32_t state_at(const Cache& cache, Handle node, std::uint32_t owned) const;
};

// By kind; most models have full attention alone, which lies in the lease itself.
struct Holdings {
  explicit Holdings(const std::vector<Component>& rows);

  bool slides() const { return !full; }                   // the first component
  const Table& table(std::uint32_t component = 0) const;  // empty: a state has none
  std::size_t size() const { return (full ? 1 : 0) + sliding.size() + states.size(); }
  void free(Cache& cache, std::size_t owned);
  // Calls `each` with every holding that has a table.
  template <class Each>
  void each_table(Each each) {
    if (full) each(*full);
    for (Sliding& own : sliding)
      each(own);
  }

  std::optional<Paged> full;
  std::vector<Sliding> sliding;
  std::vector<StateSlot> states;
};

}  // namespace mainstem
