// Recall: pages by name, each with a time and a small number, in the order in which they were added. It forgets the
// oldest, and what it has no memory for. It uses 22 to 26 bytes per entry, 4 more with times of 8 bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace mainstem {

template <class Time>
class Recall {
 public:
  struct Entry {
    std::uint64_t page;
    Time time = 0;
    std::uint8_t note = 0;
  };
  struct Ignore {
    void operator()(const Entry&) const {}
  };

  std::size_t size() const { return size_; }
  std::size_t bytes() const {
    return pages_.capacity() * (sizeof(std::uint64_t) + sizeof(Time) + sizeof(std::uint32_t) + 1) +
           table_.capacity() * sizeof(std::uint32_t);
  }

  bool contains(std::uint64_t page) const { return place(page) != kNowhere; }
  bool find(std::uint64_t page, Entry* entry) const noexcept {
    const std::uint32_t at = place(page);
    if (at == kNowhere) return false;
    *entry = entry_at(at);
    return true;
  }
  // Prefetches a page for a lookup that follows.
  void expect(std::uint64_t page) const {
    if (!table_.empty()) __builtin_prefetch(&table_[page * 0x9E3779B97F4A7C15ull >> shift_]);
  }
  // Removes a page. Returns whether it was present, and sets `entry` to what was known of it.
  bool remove(std::uint64_t page, Entry* entry = nullptr) noexcept {
    const std::uint32_t at = place(page);
    if (at == kNowhere) return false;
    if (entry) *entry = entry_at(at);
    erase(at);
    return true;
  }
  // Adds a page as the newest. Beyond `limit` entries, drops the oldest, which it passes to `forgotten`.
  template <class Forgotten = Ignore>
  void add(Entry entry, std::size_t limit, Forgotten forgotten = {}) noexcept {
    remove(entry.page);
    if (limit == 0) return clear(forgotten);
    if (used_ == pages_.size()) make_room(limit);
    while (size_ && (size_ >= limit || used_ == pages_.size()))
      forget_oldest(forgotten);
    if (used_ < pages_.size()) append(entry);
  }
  // Drops what is not worth keeping, if there are `limit` entries; looks now and then.
  template <class Keep>
  void weed(std::size_t limit, Keep keep) noexcept {
    if (size_ && size_ >= limit && added_ >= limit / 4) pack(pages_.size(), keep);
  }
  void bound(std::size_t limit) noexcept {
    if (limit == 0) return clear(Ignore());
    while (size_ > limit)
      forget_oldest(Ignore());
  }
  // Drops at most so many of the oldest entries, as long as they fit, and passes them to `forgotten`.
  template <class Fits, class Forgotten>
  void drop_oldest(std::size_t most, Fits fits, Forgotten forgotten) noexcept {
    for (; most > 0 && size_ && fits(entry_at(first_)); --most)
      forget_oldest(forgotten);
  }
  // Visits all entries, the oldest first.
  template <class Each>
  void each(Each each) const {
    for (std::size_t i = 0; i < used_; ++i)
      if (const std::size_t at = ring(first_ + i); notes_[at] != kErased) each(entry_at(at));
  }

 private:
  static constexpr std::uint32_t kNowhere = std::numeric_limits<std::uint32_t>::max();
  static constexpr std::uint8_t kErased = 255;

  std::size_t ring(std::size_t at) const { return at < pages_.size() ? at : at - pages_.size(); }
  Entry entry_at(std::size_t at) const { return {pages_[at], times_[at], notes_[at]}; }
  std::uint32_t& bucket(std::uint64_t page) { return table_[page * 0x9E3779B97F4A7C15ull >> shift_]; }
  std::uint32_t place(std::uint64_t page) const {
    if (table_.empty()) return kNowhere;
    std::uint32_t at = table_[page * 0x9E3779B97F4A7C15ull >> shift_];
    while (at != kNowhere && pages_[at] != page)
      at = next_[at];
    return at;
  }
  void erase(std::uint32_t at) noexcept {
    std::uint32_t* link = &bucket(pages_[at]);
    while (*link != at)
      link = &next_[*link];
    *link = next_[at];
    notes_[at] = kErased;
    --size_;
    drop_erased();
  }
  void drop_erased() noexcept {
    for (; used_ && notes_[first_] == kErased; --used_)
      first_ = ring(first_ + 1);
  }
  template <class Forgotten>
  void forget_oldest(Forgotten forgotten) noexcept {
    const Entry oldest = entry_at(first_);
    erase(static_cast<std::uint32_t>(first_));
    forgotten(oldest);
  }

  template <class Forgotten>
  void clear(Forgotten forgotten) noexcept {
    each(forgotten);
    *this = Recall{};
  }
  void append(const Entry& entry) noexcept {
    const std::size_t at = ring(first_ + used_++);
    pages_[at] = entry.page;
    times_[at] = entry.time;
    notes_[at] = entry.note;
    std::uint32_t& head = bucket(entry.page);
    next_[at] = head;
    head = static_cast<std::uint32_t>(at);
    ++size_;
    ++added_;
  }

  // Entries erased between others take room until the rest is packed: when they are a sixteenth of all.
  void make_room(std::size_t limit) noexcept {
    const std::size_t enough = limit + limit / 16 + 8;
    const std::size_t larger = std::min(enough, std::max<std::size_t>(16, pages_.size() * 2));
    const bool sparse = size_ + size_ / 16 < used_ || larger <= pages_.size();
    pack(sparse ? pages_.size() : larger, [](const Entry&) { return true; });
  }
  template <class Keep>
  void pack(std::size_t room, Keep keep) noexcept {
    Recall other;
    try {
      other.pages_.resize(room);
      other.times_.resize(room);
      other.notes_.resize(room, kErased);
      other.next_.resize(room);
      other.table_.resize(std::bit_ceil(std::max<std::size_t>(room, 2)), kNowhere);
    } catch (const std::bad_alloc&) {
      return;
    }
    other.shift_ = 64 - std::countr_zero(other.table_.size());
    each([&](const Entry& entry) {
      if (keep(entry)) other.append(entry);
    });
    other.added_ = 0;
    *this = std::move(other);
  }

  std::vector<std::uint64_t> pages_;  // a ring, like the next three
  std::vector<Time> times_;
  std::vector<std::uint8_t> notes_;
  std::vector<std::uint32_t> next_;   // in its bucket
  std::vector<std::uint32_t> table_;  // the first entry of each bucket
  std::size_t first_ = 0, used_ = 0;  // of the ring, erased entries included
  std::size_t size_ = 0, added_ = 0;  // entries; added since the last pack
  int shift_ = 63;
};
}  // namespace mainstem
