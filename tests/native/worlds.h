// Shared by the random tests that compare the core with a model of their own: how a world is driven, how its keys
// divide into pages, and what their models have in common.
#pragma once

#include <algorithm>
#include <set>

#include "lease/lease.h"
#include "support.h"

namespace mainstem {

// Runs random operations on a world, then releases everything it holds. A failure says where it happened.
template <class World>
void drive(World& world, const std::string& what, std::uint64_t seed, std::uint32_t operations) {
  std::uint32_t done = 0;
  const auto where = [&] {
    std::string text = what + ", seed " + std::to_string(seed) + ", operation " + std::to_string(done);
    if constexpr (requires { world.doing(); }) text += ", " + world.doing();
    return text + ": ";
  };
  try {
    for (; done < operations; ++done)
      world.step();
    world.finish();
  } catch (const Failure& failure) {
    throw Failure{where() + failure.what};
  } catch (const Corrupt& error) {
    throw Failure{where() + "check: " + error.message};
  } catch (const WrongOwner& error) {
    throw Failure{where() + error.message};
  } catch (const StaleHandle& error) {
    throw Failure{where() + "StaleHandle: " + std::to_string(error.handle)};
  } catch (const BadValue& error) {
    throw Failure{where() + "BadValue: " + error.name + " " + error.value + ", allowed: " + error.allowed};
  }
}

// How keys divide into pages.
struct Paging {
  std::uint32_t symbol_bytes, page_size;

  std::uint64_t page_bytes() const { return std::uint64_t{page_size} * symbol_bytes; }
  std::uint64_t pages(std::uint64_t positions) const { return (positions + page_size - 1) / page_size; }
  std::uint64_t pages(const Path& path) const { return path.second.size() / page_bytes(); }
  Path front(const Path& path, std::uint64_t pages) const {
    return {path.first, path.second.substr(0, pages * page_bytes())};
  }
  // The front of what a lease was opened with.
  template <class Holder>
  Path front(const Holder& holder, std::uint64_t pages) const {
    return front(Path{holder.ns, holder.key}, pages);
  }
};

inline PageCell cell_of(const Contents& contents, const Path& path, std::size_t column) {
  const auto found = contents.find(path);
  return found == contents.end() ? PageCell{} : found->second[column];
}

// Changes one of the `columns` cells of a page; a page without any is forgotten.
inline void put_cell(Contents* contents, const Path& path, std::size_t columns, std::size_t column, PageCell cell) {
  std::vector<PageCell>& cells = (*contents)[path];
  cells.resize(columns);
  cells[column] = cell;
  const auto empty = [](const PageCell& c) { return c.presence == Presence::absent; };
  if (std::all_of(cells.begin(), cells.end(), empty)) contents->erase(path);
}

// The most symbols of `tail` that a page of the first component, present right after `above`, begins with.
inline std::uint64_t agreement(const Paging& paging, const Contents& contents, const Path& above,
                               std::string_view tail) {
  std::ptrdiff_t best = 0;
  for (auto at = contents.lower_bound(above); at != contents.end() && begins_with(at->first, above); ++at) {
    if (at->first.second.size() != above.second.size() + paging.page_bytes()) continue;
    if (at->second[0].presence != Presence::present) continue;
    const std::string_view page = std::string_view(at->first.second).substr(above.second.size());
    const auto parted = std::mismatch(tail.begin(), tail.end(), page.begin(), page.end()).first;
    best = std::max(best, parted - tail.begin());
  }
  return static_cast<std::uint64_t>(best) / paging.symbol_bytes;
}

// Checks a lease on full attention against its holder. Returns the number of its private pages; `owned` has the pages
// of all others and gets these.
template <class Holder>
std::uint64_t compare_lease(const Paging& paging, const Holder& holder, const Contents& contents, const Pool& pool,
                            std::set<std::int32_t>* owned) {
  const Lease& lease = *holder.lease;
  expect_equal(lease.length(), holder.key.size() / paging.symbol_bytes, "the length of a lease");
  expect_equal(lease.reserved(), holder.reserved, "positions reserved");
  expect_equal(lease.published(), holder.published, "positions published");
  expect_equal(lease.hit(), holder.hit, "the hit of a lease");
  const Table& table = lease.table();
  expect_equal(table.size(), paging.pages(holder.reserved), "pages in a table");
  const std::uint64_t shared = holder.published / paging.page_size;
  for (std::uint64_t page = 0; page < table.size(); ++page) {
    const std::int32_t id = table.memory()[static_cast<std::ptrdiff_t>(page)];
    if (page < shared) {
      const PageCell expected{Presence::present, id};
      expect(cell_of(contents, paging.front(holder, page + 1), 0) == expected, "a published page is the tree's own");
    } else {
      expect(owned->insert(id).second && pool.owner(id) == std::string("private"), "a private page is this lease's");
    }
  }
  return table.size() - shared;
}

}  // namespace mainstem
