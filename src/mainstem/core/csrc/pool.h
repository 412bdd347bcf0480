// Pool: who owns each page. A page is free, cached (the tree's) or private (one lease's); nothing else, and never two.
#pragma once

#include <cstdint>
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
    for (std::uint64_t i = 0; i < n; ++i) {
      out[i] = free_.back();
      free_.pop_back();
      owner_[static_cast<std::size_t>(out[i])] = Owner::privately;
    }
    count(Owner::free, Owner::privately, n);
  }

  // Moves pages from one owner to another; all of them, or none if one is not the owner's (or comes twice).
  void move(std::span<const std::int32_t> pages, Owner from, Owner to) {
    std::size_t moved = 0;
    while (moved < pages.size() && held(pages[moved], from))
      owner_[static_cast<std::size_t>(pages[moved++])] = to;
    if (moved < pages.size()) {
      for (std::size_t i = 0; i < moved; ++i)
        owner_[static_cast<std::size_t>(pages[i])] = from;
      refuse(pages[moved], from);
    }
    if (to == Owner::free)
      for (std::size_t i = pages.size(); i-- > 0;)
        free_.push_back(pages[i]);  // the first is the next to be given out
    count(from, to, pages.size());
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
      if (!held(page, Owner::free)) return false;
    return sum[0] == count_[0] && sum[1] == count_[1] && sum[2] == count_[2] && free_.size() == count_[0];
  }

 private:
  bool held(std::int32_t page, Owner owner) const {
    return page >= 0 && static_cast<std::size_t>(page) < owner_.size() &&
           owner_[static_cast<std::size_t>(page)] == owner;
  }
  [[noreturn]] void refuse(std::int32_t page, Owner expected) const {
    const std::string is = held(page, expected) ? "named twice" : owner(page);
    throw WrongOwner{"page " + std::to_string(page) + " is " + is + ", not " +
                     kOwnerNames[static_cast<std::size_t>(expected)]};
  }
  void count(Owner from, Owner to, std::uint64_t n) {
    count_[static_cast<std::size_t>(from)] -= n;
    count_[static_cast<std::size_t>(to)] += n;
  }

  std::vector<Owner> owner_;
  std::vector<std::int32_t> free_;  // a stack: what was freed last is given out first, while it is warm
  std::uint64_t count_[3] = {0, 0, 0};
};

}  // namespace mainstem
