// Table: the page ids of one component of a lease, as attention reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "residency/residency.h"

namespace mainstem {

// The ids of one component for each page of a sequence, -1 where it has none. Memory that was handed out never changes:
// writes go after its end only, and the table moves to new memory when it needs more room or changes.
class Table {
 public:
  using Memory = std::shared_ptr<std::int32_t[]>;

  std::size_t size() const { return size_; }
  const Memory& memory() const { return memory_; }
  IdSpan from(std::size_t begin) const { return {memory_.get() + begin, size_ - begin}; }
  IdSpan part(std::size_t begin, std::size_t end) const { return {memory_.get() + begin, end - begin}; }

  void reserve(std::size_t n) {
    if (n > room_) move_to(std::max(n, 2 * size_));
  }
  std::int32_t* extend(std::size_t n) {  // call reserve() first
    size_ += n;
    return memory_.get() + size_ - n;
  }
  void drop_back(std::size_t n) { size_ -= n; }
  Memory copy(std::size_t room) const {
    Memory copy = std::make_shared_for_overwrite<std::int32_t[]>(room);
    if (size_) std::memcpy(copy.get(), memory_.get(), size_ * sizeof(std::int32_t));
    return copy;
  }
  Memory exchange(Memory other) { return std::exchange(memory_, std::move(other)); }  // for a copy of the same room
  std::size_t room() const { return room_; }
  // Returns memory that nobody else reads.
  std::int32_t* own() {
    if (memory_.use_count() > 1) move_to(room_);
    return memory_.get();
  }

 private:
  void move_to(std::size_t room) {
    memory_ = copy(room);
    room_ = room;
  }

  Memory memory_;
  std::size_t size_ = 0;
  std::size_t room_ = 0;
};

}  // namespace mainstem
