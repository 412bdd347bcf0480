// Memory that is used again: the first touch of fresh memory is slow.
#pragma once

#include <cstddef>
#include <memory>

namespace mainstem {

class Scratch {
 public:
  // Returns room for so many numbers, at the beginning of a cache line and not initialised. What was taken before is
  // gone.
  float* take(std::size_t count) {
    count = count / kLine + 1;
    if (size_ < count) lines_ = std::make_unique_for_overwrite<Line[]>(size_ = count);
    return lines_[0].floats;
  }

 private:
  static constexpr std::size_t kLine = 16;
  struct alignas(64) Line {
    float floats[kLine];
  };
  std::unique_ptr<Line[]> lines_;
  std::size_t size_ = 0;
};

}  // namespace mainstem
