// Pool: tracks the owner of each page. A page is either free, cached (the tree's) or private (one lease's).
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace mainstem {

enum class Owner : std::uint8_t { free, cached, privately };

inline constexpr const char* kOwnerNames[] = {"free", "cached", "private"};

struct WrongOwner {
  std::string message;
};
struct NoPages {
  std::uint64_t needed, free, evictable, total;
  const char* what = "pages";
};

class Pool {
 public:
  explicit Pool(std::uint32_t pages) : owner_(pages, Owner::free), free_(pages) {
    std::iota(free_.rbegin(), free_.rend(), 0);
    count_[0] = pages;
  }

  void allocate(std::uint64_t n, std::int32_t* out) {
    if (n > owned(Owner::free)) throw NoPages{n, owned(Owner::free), 0, total()};
    copy_reversed(free_.data() + owned(Owner::free), n, out);
    each_run({out, n}, [&](std::size_t at, std::size_t run) { own(out[at], run, Owner::privately); });
    count(Owner::free, Owner::privately, n);
  }

  // Moves pages from one owner to another; moves none if one of them is not the owner's, or is named twice.
  void move(std::span<const std::int32_t> page_ids, Owner from, Owner to) {
    assert(from != Owner::free);  // allocate() takes from the stack
    each_run(page_ids, [&](std::size_t at, std::size_t n) {
      if (!held(page_ids[at], n, from)) {
        undo_move(page_ids.first(at), from);
        refuse(page_ids.subspan(at, n), from);
      }
      own(page_ids[at], n, to);
    });
    if (to == Owner::free)  // the first on top
      copy_reversed(page_ids.data() + page_ids.size(), page_ids.size(), free_.data() + owned(Owner::free));
    count(from, to, page_ids.size());
    if (to == Owner::free && freed && !page_ids.empty()) freed(page_ids);
  }

  std::function<void(std::span<const std::int32_t>)> freed;  // called with pages that have become free; may be empty

  std::uint64_t owned(Owner owner) const { return count_[static_cast<std::size_t>(owner)]; }
  std::uint64_t total() const { return owner_.size(); }
  const char* owner(std::int64_t page) const {
    if (page < 0 || page >= static_cast<std::int64_t>(owner_.size()))
      throw WrongOwner{"page " + std::to_string(page) + " is not in a pool of " + std::to_string(owner_.size())};
    return kOwnerNames[static_cast<std::size_t>(owner_[static_cast<std::size_t>(page)])];
  }

  bool sound() const {
    std::uint64_t sum[3] = {0, 0, 0};
    for (const Owner owner : owner_)
      ++sum[static_cast<std::size_t>(owner)];
    for (std::uint64_t at = 0; at < count_[0]; ++at)
      if (!held(free_[at], 1, Owner::free)) return false;
    return sum[0] == count_[0] && sum[1] == count_[1] && sum[2] == count_[2];
  }

 private:
  // The compiler vectorizes only loops of known length.
  static constexpr std::size_t kLanes = 8;

  // out[i] = end[-1 - i]
  static void copy_reversed(const std::int32_t* __restrict end, std::size_t n, std::int32_t* __restrict out) {
    for (; n >= kLanes; n -= kLanes, end -= kLanes, out += kLanes)
      for (std::size_t i = 0; i < kLanes; ++i)
        out[i] = end[-1 - static_cast<std::ptrdiff_t>(i)];
    while (n-- > 0)
      *out++ = *--end;
  }
  // Calls `each` with the begin and the length of each run of consecutive ids: pages allocated together mostly are one.
  template <class Each>
  static void each_run(std::span<const std::int32_t> page_ids, Each each) {
    for (std::size_t at = 0, n; at < page_ids.size(); at += n)
      each(at, n = run_length(page_ids.subspan(at)));
  }
  void own(std::int32_t page, std::size_t n, Owner owner) {
    std::memset(&owner_[static_cast<std::size_t>(page)], static_cast<int>(owner), n);
  }
  // Whether each id of a group follows the one before it.
  static bool all_follow(const std::int32_t* page_ids) {
    std::int32_t apart = 0;
    for (std::size_t i = 0; i < kLanes; ++i)
      apart |= page_ids[i] ^ (page_ids[i - 1] + 1);
    return apart == 0;
  }
  // How many ids at the front are consecutive: 7 8 9 | 4 ...
  static std::size_t run_length(std::span<const std::int32_t> page_ids) {
    std::size_t n = 1;
    const auto step = [&](std::size_t end) {
      while (n < end && page_ids[n] == page_ids[n - 1] + 1)
        ++n;
    };
    step(std::min(page_ids.size(), kLanes));
    if (n < kLanes) return n;
    while (n + kLanes <= page_ids.size() && all_follow(&page_ids[n]))
      n += kLanes;
    step(page_ids.size());
    return n;
  }
  // Whether pages [page, page + n) are all the owner's, n > 0.
  bool held(std::int32_t page, std::size_t n, Owner owner) const {
    const auto first = static_cast<std::size_t>(page);
    if (page < 0 || first + n > owner_.size() || owner_[first] != owner) return false;
    return std::memcmp(&owner_[first], &owner_[first] + 1, n - 1) == 0;  // each equals the one before
  }
  void undo_move(std::span<const std::int32_t> page_ids, Owner owner) {
    for (const std::int32_t page : page_ids)
      owner_[static_cast<std::size_t>(page)] = owner;
  }
  [[noreturn]] void refuse(std::span<const std::int32_t> page_ids, Owner expected) const {
    std::int32_t page = page_ids.front();
    for (const std::int32_t other : page_ids)
      if (!held(other, 1, expected)) {
        page = other;
        break;
      }
    const std::string is = held(page, 1, expected) ? "named twice" : owner(page);
    throw WrongOwner{"page " + std::to_string(page) + " is " + is + ", not " +
                     kOwnerNames[static_cast<std::size_t>(expected)]};
  }
  void count(Owner from, Owner to, std::uint64_t n) {
    count_[static_cast<std::size_t>(from)] -= n;
    count_[static_cast<std::size_t>(to)] += n;
  }

  std::vector<Owner> owner_;
  std::vector<std::int32_t> free_;  // a stack of count_[free] ids: allocates the page freed last, while it is warm
  std::uint64_t count_[3] = {0, 0, 0};
};

}  // namespace mainstem
