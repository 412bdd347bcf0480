// LRU shadow: tracks what LRU would hold. A histogram of the last use of all known pages, in slots of about a 64th of
// the capacity: LRU would hold the newest ones, up to the capacity. A page's depth is the number of pages used since.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace mainstem {

class LruShadow {
 public:
  LruShadow() {
    slots_.reserve(kSlots + 1);
    slots_.push_back({});
  }

  std::uint64_t edge() const { return edge_; }  // LRU has what was used since then
  // The expected hits of LRU on pages that it would have and we lack, before it drops them.
  double at_risk() const { return at_risk_; }
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

  // Starts a request; times must not decrease. Until the cache is full (no capacity is known), LRU has what we have.
  void begin(std::uint64_t time, std::uint64_t capacity, bool full) noexcept {
    if (slots_.size() >= kSlots) merge(width(capacity));
    if (full) drop(time, capacity);
    if (slots_.back().pages < width(capacity) || slots_.size() == slots_.capacity()) {
      ++slots_.back().requests;
      return;
    }
    slots_.push_back({time, 0, 0, 1, 0, slots_.back().chance});
    if (time < weighed_ + capacity / 16) return;
    weighed_ = time;
    weigh(static_cast<double>(capacity));
  }
  void use(std::uint64_t time, std::uint64_t pages) noexcept {
    if (time < slots_.front().from) return;
    Slot& slot = find(time);
    slot.pages += pages;
    slot.ours += pages;
    held_ += pages;
  }
  // Pages last used at that time are used again now. `ours`: whether we have them.
  void forget(std::uint64_t time, std::uint64_t pages, bool ours) noexcept {
    if (time < slots_.front().from) return;
    Slot& slot = find(time);
    const std::uint64_t some = std::min(pages, slot.pages);
    slot.pages -= some;
    held_ -= some;
    if (ours)
      slot.ours -= std::min(pages, slot.ours);
    else
      at_risk_ = std::max(0.0, at_risk_ - slot.chance * static_cast<double>(some));
  }
  void evicted(std::uint64_t time, std::uint64_t pages) noexcept {
    if (time < slots_.front().from) return;
    Slot& slot = find(time);
    slot.ours -= std::min(pages, slot.ours);
    if (time >= edge_) at_risk_ += slot.chance * static_cast<double>(pages);
  }
  // What LRU hits and misses once it is full.
  void hit(std::uint64_t time, double pages) noexcept { hits_[find(time).bin] += pages; }
  void missed(double pages) noexcept { misses_ += pages; }

 private:
  static constexpr std::size_t kSlots = 192;
  static constexpr int kBins = 16;      // by depth
  static constexpr double kUnsure = 1;  // capacities; until LRU has missed this much, hits are assumed likely
  struct Slot {
    std::uint64_t from = 0;
    std::uint64_t pages = 0, ours = 0;
    std::uint32_t requests = 0;
    std::int32_t bin = 0;
    double chance = 1;
  };

  static std::uint64_t width(std::uint64_t capacity) { return std::max<std::uint64_t>(1, capacity / 64); }
  Slot& find(std::uint64_t time) {
    if (time >= slots_.back().from) return slots_.back();
    const auto after = std::upper_bound(slots_.begin(), slots_.end(), time,
                                        [](std::uint64_t t, const Slot& slot) { return t < slot.from; });
    return after == slots_.begin() ? slots_.front() : *(after - 1);
  }

  // Drops slots that LRU would no longer have, and finds where in the oldest slot its content begins. A single request
  // keeps the end of its path, which was used first; several requests are assumed to be spread evenly.
  void drop(std::uint64_t now, std::uint64_t capacity) noexcept {
    std::size_t gone = 0;
    for (; gone + 1 < slots_.size() && held_ - slots_[gone].pages >= capacity; ++gone)
      held_ -= slots_[gone].pages;
    slots_.erase(slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(gone));
    const Slot& oldest = slots_.front();
    edge_ = oldest.from;
    if (held_ <= capacity || oldest.pages == 0) return;
    const std::uint64_t over = std::min(oldest.pages, held_ - capacity);
    const std::uint64_t to = slots_.size() > 1 ? slots_[1].from : now;
    edge_ += oldest.requests == 1 ? over : (to - oldest.from) * over / oldest.pages;
  }
  // Afterwards two neighbours hold more than a width, so there are at most about 130 slots.
  void merge(std::uint64_t width) noexcept {
    std::size_t kept = 0;
    for (std::size_t i = 1; i < slots_.size(); ++i) {
      Slot& before = slots_[kept];
      if (before.pages + slots_[i].pages <= width) {
        before.pages += slots_[i].pages;
        before.ours += slots_[i].ours;
        before.requests += slots_[i].requests;
      } else {
        slots_[++kept] = slots_[i];
      }
    }
    slots_.resize(kept + 1);
  }

  // The chance at a depth: everything in LRU passes it, and pages hit further down were not dropped. Pages that we gave
  // up may share a fate, so the first capacities say little.
  void weigh(double capacity) noexcept {
    std::array<double, kBins> chance{};
    double below = 0;
    for (int bin = kBins; bin-- > 0;) {
      const double saved = below + hits_[bin] / 2 + kUnsure * capacity;
      chance[bin] = saved / std::max(1.0, saved + misses_);
      below += hits_[bin];
    }
    at_risk_ = 0;
    double newer = 0;
    for (std::size_t i = slots_.size(); i-- > 0;) {
      Slot& slot = slots_[i];
      const auto pages = static_cast<double>(slot.pages), given_up = pages - static_cast<double>(slot.ours);
      const double depth = (newer + pages / 2) / std::max(1.0, capacity);
      slot.bin = static_cast<int>(std::min<double>(kBins - 1, depth * kBins));
      slot.chance = chance[slot.bin];
      if (given_up > 0) at_risk_ += given_up * slot.chance;
      newer += pages;
    }
  }

  std::vector<Slot> slots_;  // the oldest first; never empty
  std::uint64_t held_ = 0, edge_ = 0, weighed_ = 0;
  std::array<double, kBins> hits_{};  // of LRU, by depth
  double misses_ = 0, at_risk_ = 0;
};

}  // namespace mainstem
