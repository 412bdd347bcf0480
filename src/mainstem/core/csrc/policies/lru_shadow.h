// LRU's shadow: what LRU would hold, without holding it. A histogram of when the known pages were used last, in slots of
// about a 64th of the capacity: the newest ones up to the capacity are what LRU would have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mainstem {

class LruShadow {
 public:
  LruShadow() {
    slots_.reserve(kSlots + 1);
    slots_.push_back({});
  }

  std::uint64_t edge() const { return edge_; }  // LRU has what was used since
  // Pages that LRU would have and we have not.
  std::uint64_t given_up() const { return held_ - std::min(held_, ours_); }
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

  // Pages used last at that time, now are not any more; whether we have them.
  void forget(std::uint64_t time, std::uint64_t pages, bool ours) noexcept {
    if (time < slots_.front().from) return;
    Slot& slot = find(time);
    const std::uint64_t some = std::min(pages, slot.pages);
    slot.pages -= some;
    held_ -= some;
    if (ours) take(&slot, pages);
  }
  void evicted(std::uint64_t time, std::uint64_t pages) noexcept {
    if (time >= slots_.front().from) take(&find(time), pages);
  }
  // A request that began at that time uses pages now; times never fall.
  void begin(std::uint64_t time, std::uint64_t capacity) noexcept {
    settle(time, capacity);
    if (slots_.back().pages >= width(capacity) && slots_.size() < slots_.capacity()) slots_.push_back({time, 0, 0});
  }
  void use(std::uint64_t time, std::uint64_t pages) noexcept {
    if (time < slots_.front().from) return;
    Slot& slot = find(time);
    slot.pages += pages;
    slot.ours += pages;
    held_ += pages;
    ours_ += pages;
  }

 private:
  static constexpr std::size_t kSlots = 192;
  struct Slot {
    std::uint64_t from = 0;
    std::uint64_t pages = 0, ours = 0;
  };

  static std::uint64_t width(std::uint64_t capacity) { return std::max<std::uint64_t>(1, capacity / 64); }
  Slot& find(std::uint64_t time) {
    if (time >= slots_.back().from) return slots_.back();
    const auto after = std::upper_bound(slots_.begin(), slots_.end(), time,
                                        [](std::uint64_t t, const Slot& slot) { return t < slot.from; });
    return *(after - 1);
  }
  void take(Slot* slot, std::uint64_t pages) noexcept {
    const std::uint64_t some = std::min(pages, slot->ours);
    slot->ours -= some;
    ours_ -= some;
  }

  // Drops slots that LRU would not have any more, and finds where in the oldest one its content begins.
  void settle(std::uint64_t now, std::uint64_t capacity) noexcept {
    if (slots_.size() >= kSlots) merge(width(capacity));
    std::size_t gone = 0;
    for (; gone + 1 < slots_.size() && held_ - slots_[gone].pages >= capacity; ++gone) {
      held_ -= slots_[gone].pages;
      ours_ -= slots_[gone].ours;
    }
    slots_.erase(slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(gone));
    const Slot& oldest = slots_.front();
    edge_ = oldest.from;
    if (held_ <= capacity || oldest.pages == 0) return;
    const std::uint64_t to = slots_.size() > 1 ? slots_[1].from : now;
    edge_ += (to - oldest.from) * std::min(oldest.pages, held_ - capacity) / oldest.pages;
  }
  // Two neighbours hold more than a width then, so there are at most about 130.
  void merge(std::uint64_t width) noexcept {
    std::size_t kept = 0;
    for (std::size_t i = 1; i < slots_.size(); ++i) {
      Slot& before = slots_[kept];
      if (before.pages + slots_[i].pages <= width) {
        before.pages += slots_[i].pages;
        before.ours += slots_[i].ours;
      } else {
        slots_[++kept] = slots_[i];
      }
    }
    slots_.resize(kept + 1);
  }

  std::vector<Slot> slots_;  // the oldest first; never empty
  std::uint64_t held_ = 0, ours_ = 0, edge_ = 0;
};

}  // namespace mainstem
