// Pool: tracks the owner of each page. A page is either free, cached (the tree's) or private (one lease's).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
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
  explicit Pool(std::uint32_t pages) : owner_(pages, Owner::free) {
    free_.reserve(pages);
    for (std::uint32_t page = pages; page-- > 0;)
      free_.push_back(static_cast<std::int32_t>(page));
    count_[0] = pages;
  }

  void allocate(std::uint64_t n, std::int32_t* out) {
    if (n > free_.size()) throw NoPages{n, free_.size(), 0, owner_.size()};
    const std::int32_t* top = free_.data() + free_.size();
    for (std::uint64_t i = 0; i < n; ++i)
      owner_[static_cast<std::size_t>(out[i] = *--top)] = Owner::privately;
    free_.resize(free_.size() - n);
    count(Owner::free, Owner::privately, n);
  }

  // Moves pages from one owner to another; moves none if one of them is not the owner's, or is named twice.
  void move(std::span<const std::int32_t> page_ids, Owner from, Owner to) {
    // Pages allocated together mostly have consecutive ids: move each run at once.
    for (std::size_t at = 0; at < page_ids.size();) {
      const std::size_t n = run_length(page_ids.subspan(at));
      if (!held(page_ids[at], n, from)) {
        undo_move(page_ids.first(at), from);
        refuse(page_ids.subspan(at, n), from);
      }
      std::memset(&owner_[static_cast<std::size_t>(page_ids[at])], static_cast<int>(to), n);
      at += n;
    }
    if (to == Owner::free) free_.insert(free_.end(), page_ids.rbegin(), page_ids.rend());  // the first on top
    count(from, to, page_ids.size());
  }

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
    for (const std::int32_t page : free_)
      if (!held(page, 1, Owner::free)) return false;
    return sum[0] == count_[0] && sum[1] == count_[1] && sum[2] == count_[2] && free_.size() == count_[0];
  }

 private:
  // The compiler vectorizes only loops of known length.
  static constexpr std::size_t kLanes = 8;

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
  std::vector<std::int32_t> free_;  // a stack: allocates the page freed last, while it is warm
  std::uint64_t count_[3] = {0, 0, 0};
};

}  // namespace mainstem
