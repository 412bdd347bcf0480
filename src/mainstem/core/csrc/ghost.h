// Ghost: evicted pages by identity, in order of eviction, each with a number. It holds a bounded number of pages, 36 to
// 72 bytes each, and forgets what it has no memory for.
#pragma once

#include <cstdint>
#include <new>
#include <vector>

namespace mainstem {

class Ghost {
 public:
  std::size_t size() const { return size_; }
  bool contains(std::uint64_t page) const { return find(page) != kNowhere; }
  std::size_t bytes() const { return entries_.capacity() * sizeof(Entry) + table_.capacity() * sizeof(std::uint32_t); }

  // Adds a page as the newest. Drops the oldest ones until there are at most `limit`.
  void add(std::uint64_t page, std::size_t limit, std::uint64_t note = 0) noexcept {
    remove(page);
    bound(limit ? limit - 1 : 0);
    if (limit == 0) return;
    const std::uint32_t at = room();
    if (at == kNowhere) return;
    std::uint32_t& head = bucket(page);
    entries_[at] = {page, note, head, kNowhere, newest_};
    head = at;
    (newest_ == kNowhere ? oldest_ : entries_[newest_].newer) = at;
    newest_ = at;
    ++size_;
  }

  // Removes a page. Returns whether it was present, and sets `note` to its number.
  bool remove(std::uint64_t page, std::uint64_t* note = nullptr) noexcept {
    const std::uint32_t at = find(page);
    if (at == kNowhere) return false;
    Entry& entry = entries_[at];
    if (note) *note = entry.note;
    std::uint32_t* link = &bucket(page);
    while (*link != at)
      link = &entries_[*link].next;
    *link = entry.next;
    (entry.older == kNowhere ? oldest_ : entries_[entry.older].newer) = entry.newer;
    (entry.newer == kNowhere ? newest_ : entries_[entry.newer].older) = entry.older;
    entry.next = free_;
    free_ = at;
    --size_;
    return true;
  }

  void bound(std::size_t limit) noexcept {
    if (limit == 0 && size_) *this = Ghost{};
    while (size_ > limit)
      remove(entries_[oldest_].page);
  }

 private:
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};
  struct Entry {
    std::uint64_t page = 0, note = 0;
    std::uint32_t next = kNowhere;  // in its bucket, or the next free one
    std::uint32_t newer = kNowhere, older = kNowhere;
  };

  std::uint32_t& bucket(std::uint64_t page) { return table_[page * 0x9E3779B97F4A7C15ull >> shift_]; }
  std::uint32_t find(std::uint64_t page) const {
    if (table_.empty()) return kNowhere;
    std::uint32_t at = table_[page * 0x9E3779B97F4A7C15ull >> shift_];
    while (at != kNowhere && entries_[at].page != page)
      at = entries_[at].next;
    return at;
  }
  std::uint32_t room() noexcept {
    if (free_ == kNowhere && !grow()) return kNowhere;
    const std::uint32_t at = free_;
    free_ = entries_[at].next;
    return at;
  }
  // Adds an entry, and enlarges the table when there are as many entries as buckets.
  bool grow() noexcept {
    try {
      if (entries_.size() == table_.size()) {
        std::vector<std::uint32_t> table(table_.empty() ? 16 : table_.size() * 2, kNowhere);
        entries_.reserve(table.size());
        table_.swap(table);
        shift_ = 64 - __builtin_ctzll(table_.size());
        for (std::uint32_t at = 0; at < entries_.size(); ++at) {  // none is free
          std::uint32_t& head = bucket(entries_[at].page);
          entries_[at].next = head;
          head = at;
        }
      }
    } catch (const std::bad_alloc&) {
      return false;
    }
    free_ = static_cast<std::uint32_t>(entries_.size());
    entries_.emplace_back();
    return true;
  }

  std::vector<Entry> entries_;
  std::vector<std::uint32_t> table_;  // the first entry of each bucket
  int shift_ = 64;
  std::uint32_t free_ = kNowhere, oldest_ = kNowhere, newest_ = kNowhere;
  std::size_t size_ = 0;
};

}  // namespace mainstem
