// Sketch: estimates how often each of many names was seen recently: the least of four shared counters (Cormode and
// Muthukrishnan 2005). All counters are halved after ten times as many names as there are pages. 8 to 16 bytes per
// page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "../children.h"

namespace mainstem {

class Sketch {
 public:
  std::size_t bytes() const { return counters_.capacity(); }

  // Makes room for the names of `pages` pages; keeps the counts.
  void widen(std::uint64_t pages) noexcept {
    if (2 * pages <= width_) return;
    std::uint64_t width = std::max<std::uint64_t>(width_, 64);
    while (width < 2 * pages)
      width *= 2;
    try {
      std::vector<std::uint8_t> wider(kRows * width);
      for (std::uint64_t row = 0; width_ && row < kRows; ++row)
        for (std::uint64_t at = 0; at < width; ++at)
          wider[row * width + at] = counters_[row * width_ + (at & (width_ - 1))];
      counters_.swap(wider);
      width_ = width;
    } catch (const std::bad_alloc&) {
      return;  // more names share a counter
    }
  }

  void add(std::uint64_t name) noexcept {
    if (width_ == 0) return;
    for (std::uint64_t row = 0; row < kRows; ++row) {
      std::uint8_t& counter = counters_[place(row, name)];
      if (counter < kMaxCount) ++counter;
    }
    if (++added_ < 5 * width_) return;
    added_ /= 2;
    for (std::uint8_t& counter : counters_)
      counter /= 2;
  }

  std::uint32_t count(std::uint64_t name) const {
    std::uint32_t least = width_ ? kMaxCount : 0;
    for (std::uint64_t row = 0; width_ && row < kRows; ++row)
      least = std::min<std::uint32_t>(least, counters_[place(row, name)]);
    return least;
  }

 private:
  static constexpr std::uint64_t kRows = 4;
  static constexpr std::uint8_t kMaxCount = 15;

  std::uint64_t place(std::uint64_t row, std::uint64_t name) const {
    return row * width_ + (fold(name, 0x9E3779B97F4A7C15ull + 2 * row) & (width_ - 1));
  }

  std::vector<std::uint8_t> counters_;
  std::uint64_t width_ = 0, added_ = 0;  // counters per row, a power of two
};

}  // namespace mainstem
