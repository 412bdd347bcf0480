// Gittins: learns for each kind of page when it is used again, and evicts what is worth least for the time that it must
// be held (reuse_index.h). It evicts like LRU until it has enough data, and whenever it risks too many lost hits
// compared to LRU (lru_shadow.h). docs/research/learned-policy.md describes its design and the effect of each part.
//
// Time is counted in requested pages. A page's kind is set at each use: how often it was used, whether a known prefix
// led to it, and how many pages of its last request had never been seen. Evicted pages are remembered sparsely: a
// request uses a path from its root, so the last page of a run stands for all pages above it.
#pragma once

#include <bit>

#include "eviction/policies/age_lists.h"
#include "eviction/policies/lru_shadow.h"
#include "eviction/policies/recall.h"
#include "eviction/policies/reuse_index.h"
#include "eviction/replacement.h"

namespace mainstem {

struct GittinsRecord : InQueue, Aged {
  std::uint8_t reuses = 0, kind = 0;
  bool here = false;
  bool tail = false;     // its last page ended its request, and was not used since
  bool covered = false;  // a page below it is remembered, and stands for it
};

class Gittins final : public Remembering<GittinsRecord> {
 public:
  explicit Gittins(const Surroundings& around) : Remembering(around), leaves_(&records_) {}
  std::size_t bytes() const override {
    return Remembering::bytes() + leaves_.bytes() + shadow_.bytes() + evicted_.bytes() + followed_.bytes() +
           path_.capacity() * sizeof(Index) + coming_.capacity() * sizeof(Past);
  }

  Place place(Index, std::uint64_t accessed) const override { return {{number(accessed), 0}}; }  // LRU's
  bool alike(Index upper, Index lower) const override {
    const GittinsRecord &u = records_[upper], &l = records_[lower];
    return u.reuses == l.reuses && u.kind == l.kind && !u.tail;
  }
  void joined(Index upper, Index lower) noexcept override {
    reuse_at(upper, records_[lower].last);
    records_[upper].here = false;
  }
  void split(Index upper, Index lower) noexcept override {
    GittinsRecord& record = records_[upper] = records_[lower];
    record.last += node(lower).pages;
    record.tail = record.covered = false;
    record.list = Aged::kNoList;
  }
  void asked(std::uint64_t root, Index deepest, Bytes key) noexcept override;
  std::uint32_t alike_pages(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept override;
  void came(Index index) noexcept override;
  void gone(Index index, std::uint32_t pages) noexcept override;

  void offered(Index index) noexcept override {
    leaves_.remove(index);
    leaves_.put(index, kind_of_end(records_[index]), now(), index_);
  }
  void withdrawn(Index index) noexcept override { leaves_.remove(index); }
  bool offers(Index index, bool) const override { return records_[index].list != Aged::kNoList; }
  Index victim(const Queues& queues) override {
    const bool as_lru = !ripe_ || lost_ + shadow_.at_risk() > may_lose();
    return as_lru ? queues.top() : leaves_.lowest();
  }
  std::uint64_t at_once(Index victim) const override { return records_[victim].tail ? 1 : kAtOnce; }

 private:
  using Recall = mainstem::Recall<std::uint32_t>;

  // How much is remembered, in capacities. One page in kFollowed is followed, chosen by its content.
  static constexpr std::uint64_t kEvicted = 2, kFollowing = 2, kLeastFollowing = 512;  // the last one in pages
  static constexpr std::uint64_t kFollowed = 16;
  static constexpr std::uint32_t kMark = 8;     // every kMark-th page of a path is remembered, whatever is below it
  static constexpr std::uint64_t kAtOnce = 16;  // pages evicted between two checks of the lost hits
  static constexpr std::uint8_t kMaxReuses = 127, kSpeaks = 128;  // kSpeaks: a flag of an evicted page
  static constexpr std::uint64_t kLesson = 4096;                  // the fewest pages between two lessons
  static constexpr double kMayLose = 0.001;                       // hits of LRU, as a part of all requested pages
  // Gains count up to kMaxGained times that, or kMinGained capacities, so that a bad phase is noticed.
  static constexpr double kMaxGained = 10, kMinGained = 0.05;

  struct Past {  // the history of a page that is not present
    std::uint64_t name;
    std::uint32_t last = 0;
    std::int16_t reuses = -1;  // -1: never seen
  };

  std::uint32_t now() const { return static_cast<std::uint32_t>(now_); }
  std::uint64_t when(std::uint32_t last) const { return now_ - (now() - last); }
  static std::uint8_t one_more(std::uint8_t reuses) { return reuses < kMaxReuses - 1 ? reuses + 1 : reuses; }
  static std::uint8_t kind(std::uint8_t reuses, bool known_prefix, std::uint32_t fresh) {
    const int group = reuses == 0   ? (known_prefix ? 2 : 1)
                      : reuses <= 2 ? reuses + 2
                      : reuses <= 4 ? 5
                      : reuses <= 8 ? 6
                                    : 7;
    const int size = fresh < 2 ? 0 : std::min(5, static_cast<int>(std::bit_width(fresh)) / 2);
    return static_cast<std::uint8_t>(group * ReuseIndex::kKindsInGroup + size);
  }
  // Most requests end inside a page. Such a page never returns, so it is a kind of its own; if it returns, it was used.
  static int kind_of_end(const GittinsRecord& record) {
    return record.tail ? record.kind % ReuseIndex::kKindsInGroup : record.kind;
  }

  double followed_a_request() const { return requests_ ? number(now_) / number(requests_) / kFollowed : 1; }
  double may_lose() const { return kMayLose * number(now_ + capacity()); }
  bool worth_keeping(const Recall::Entry& evicted) const {
    return (evicted.note & kSpeaks) || when(evicted.time) >= shadow_.edge();
  }

  void begin(std::uint32_t depth, std::uint64_t pages) noexcept;
  void look(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept;
  void look_alone(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept;
  bool foreseen(Index index) const;
  std::uint32_t find_as_lru() noexcept;
  void judge(std::uint32_t hits) noexcept;
  void use(Index index) noexcept;
  void reuse_at(Index index, std::uint32_t last) noexcept;
  void recall(Index index) noexcept;
  void follow(Index index) noexcept;
  void follow(std::uint64_t page, int kind) noexcept;
  void note_life(const Recall::Entry& entry) noexcept;
  void learn() noexcept;

  ReuseIndex index_;
  AgeLists<GittinsRecord> leaves_;
  LruShadow shadow_;
  Recall evicted_;   // pages that stand for a run, and pages that LRU would have
  Recall followed_;  // by kind

  std::uint64_t now_ = 0, requests_ = 0, lesson_ = 0, next_lesson_ = 0;
  double lost_ = 0;    // hits of LRU that we missed
  bool ripe_ = false;  // there is enough data

  // The current request.
  std::vector<Index> path_;                            // the nodes it found
  std::vector<Past> coming_;                           // the pages it did not find
  std::uint32_t coming_at_ = 0, known_ = 0, end_ = 0;  // depths in pages: of coming_, of the known pages, of its end
  bool announced_ = false;                             // by a lookup
  std::uint32_t base_ = 0;                             // a page that ends at depth d is used at base - d
};

// Starts a request for `pages` pages, and advances the time by that.
inline void Gittins::begin(std::uint32_t depth, std::uint64_t pages) noexcept {
  shadow_.begin(now_, capacity(), full());
  now_ += pages;
  base_ = now() + depth;
}

// Recalls the histories of the pages of a key that are not present.
inline void Gittins::look(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept {
  const std::size_t pages = key.size() / around_.page_bytes;
  coming_.clear();
  coming_at_ = known_ = depth;
  end_ = depth + static_cast<std::uint32_t>(pages);
  try {
    coming_.reserve(pages);
  } catch (const std::bad_alloc&) {
    return;
  }
  for (std::size_t page = 0; page < pages; ++page) {
    before = PageName::after(before, key.data() + page * around_.page_bytes, around_.page_bytes);
    coming_.push_back({before});
    evicted_.expect(before);
  }
  std::uint32_t age = 0;
  std::int16_t reuses = -1;
  for (std::size_t page = pages; page-- > 0;) {
    Recall::Entry found;
    if (evicted_.find(coming_[page].name, &found)) {
      age = reuses < 0 ? now() - found.time : std::min(age, now() - found.time);
      reuses = std::max<std::int16_t>(reuses, found.note & kMaxReuses);
      known_ = std::max(known_, depth + static_cast<std::uint32_t>(page) + 1);
    }
    if (reuses < 0) continue;
    coming_[page].reuses = reuses;
    coming_[page].last = now() - age;
    if (age) --age;  // the page above was used one page later
  }
}

// Handles an insertion without a lookup before it.
inline void Gittins::look_alone(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept {
  begin(depth, key.size() / around_.page_bytes);
  look(before, depth, key);
  announced_ = false;
}

inline bool Gittins::foreseen(Index index) const {
  const std::uint32_t end = node(index).end();
  return node(index).start >= coming_at_ && end <= coming_at_ + coming_.size() &&
         coming_[end - 1 - coming_at_].name == around_.names[index];
}

// Counts what LRU would have found of the current request. Returns the number of pages.
inline std::uint32_t Gittins::find_as_lru() noexcept {
  const std::uint64_t edge = shadow_.edge();
  for (const Index index : path_) {
    const std::uint64_t last = when(records_[index].last), pages = node(index).pages;
    const std::uint64_t dropped = last >= edge ? 0 : std::min(pages, edge - last);
    if (dropped < pages) shadow_.hit(last + dropped, number(pages - dropped));
    if (dropped) return node(index).end() - static_cast<std::uint32_t>(dropped);
  }
  std::uint32_t found = coming_at_;
  for (const Past& past : coming_) {
    if (past.reuses < 0 || when(past.last) < edge) break;
    shadow_.hit(when(past.last), 1);
    ++found;
  }
  return found;
}

inline void Gittins::judge(std::uint32_t hits) noexcept {
  if (!full()) return;
  const std::uint32_t as_lru = find_as_lru();
  shadow_.missed(number(end_ - as_lru));
  const double limit = std::max(kMaxGained * may_lose(), kMinGained * number(capacity()));
  lost_ = std::max(lost_ + as_lru - number(hits), -limit);
  if (!ripe_) ripe_ = now_ >= 2 * capacity() && ReuseIndex::enough(index_.reuses(), followed_a_request());
}

// A request looks up a key: everything from its root down to `deepest` is present, on some tier.
inline void Gittins::asked(std::uint64_t root, Index deepest, Bytes key) noexcept {
  path_.clear();
  try {
    for (Index at = deepest; at != kNone && !node(at).root(); at = node(at).parent)
      if (records_[at].here) path_.push_back(at);
  } catch (const std::bad_alloc&) {
    path_.clear();
  }
  std::reverse(path_.begin(), path_.end());
  const std::uint32_t hits = path_.empty() ? 0 : node(path_.back()).end();
  ++requests_;
  begin(0, key.size() / around_.page_bytes);
  look(path_.empty() ? root : around_.names[path_.back()], hits, key.subspan(std::size_t{hits} * around_.page_bytes));
  announced_ = true;
  judge(hits);
  for (const Index index : path_)
    use(index);
  if (now_ >= next_lesson_) learn();
  leaves_.age(now(), index_);
}

inline void Gittins::use(Index index) noexcept {
  GittinsRecord& record = records_[index];
  reuse_at(index, base_ - node(index).end());
  record.reuses = one_more(record.reuses);
  record.kind = kind(record.reuses, known_ > 1, end_ - known_);
  record.tail = record.covered = false;
  follow(index);
}

inline void Gittins::reuse_at(Index index, std::uint32_t last) noexcept {
  GittinsRecord& record = records_[index];
  shadow_.forget(when(record.last), node(index).pages, true);
  record.last = last;
  shadow_.use(when(last), node(index).pages);
}

// New pages with the same history form one node.
inline std::uint32_t Gittins::alike_pages(std::uint64_t before, std::uint32_t depth, Bytes key) noexcept {
  const std::size_t pages = key.size() / around_.page_bytes;
  const std::uint64_t first = PageName::after(before, key.data(), around_.page_bytes);
  const auto announced = [&] {
    return depth >= coming_at_ && depth - coming_at_ + pages <= coming_.size() &&
           coming_[depth - coming_at_].name == first;
  };
  if (!announced()) look_alone(before, depth, key);
  if (coming_.empty()) return static_cast<std::uint32_t>(pages);  // out of memory
  const Past* const past = &coming_[depth - coming_at_];
  std::size_t alike = 1;
  while (alike < pages && past[alike].reuses == past[0].reuses)
    ++alike;
  return static_cast<std::uint32_t>(alike);
}

inline void Gittins::came(Index index) noexcept {
  const Node& n = node(index);
  if (!foreseen(index))
    look_alone(PageName::above(around_.names[index], n.key.data(), n.pages, around_.page_bytes), n.start,
               {n.key.data(), n.key.size()});
  enter(index, {});
  GittinsRecord& record = records_[index];
  GittinsRecord& above = records_[n.parent];
  record.here = true;
  record.last = base_ - n.end();
  if (!coming_.empty()) recall(index);
  shadow_.use(when(record.last), n.pages);
  above.tail = false;
  record.tail = record.reuses == 0 && n.end() == end_ && n.branches == 0;
  const bool as_above = !announced_ && above.here && above.reuses == record.reuses;
  record.kind = as_above ? above.kind : kind(record.reuses, known_ > 1, end_ - known_);
  follow(index);
}

inline void Gittins::recall(Index index) noexcept {
  const Past* const past = &coming_[node(index).start - coming_at_];
  if (past->reuses < 0) return;
  records_[index].reuses = one_more(static_cast<std::uint8_t>(past->reuses));
  for (std::uint32_t page = 0; page < node(index).pages && past[page].reuses >= 0; ++page) {  // later pages may be new
    evicted_.remove(past[page].name);
    shadow_.forget(when(past[page].last), 1, false);
  }
}

inline void Gittins::gone(Index index, std::uint32_t pages) noexcept {
  Remembering::gone(index, pages);
  const Node& n = node(index);
  GittinsRecord& record = records_[index];
  shadow_.evicted(when(record.last), pages);
  std::uint32_t depth = n.end(), last = record.last;
  bool speaks = !record.covered;
  const std::uint64_t limit = kEvicted * capacity();
  const auto keep = [this](const Recall::Entry& entry) { return worth_keeping(entry); };
  around_.each_page(index, pages, [&](std::uint64_t page) {
    const bool marks = speaks || depth % kMark == 0;
    const Recall::Entry entry{page, last, static_cast<std::uint8_t>(record.reuses | (marks ? kSpeaks : 0))};
    if (keep(entry)) {
      evicted_.weed(limit, keep);
      evicted_.add(entry, limit);
    }
    speaks = record.tail && depth == n.end();
    --depth;
    ++last;
  });
  if (pages < n.pages) {
    record.last = last;
    record.covered = !record.tail || pages > 1;
    record.tail = false;
    return;
  }
  record.here = false;
  GittinsRecord& above = records_[n.parent];
  if (!above.here) return;
  above.covered = above.reuses == record.reuses && above.last == last && !(record.tail && pages == 1);
  if (static_cast<std::int32_t>(record.last - above.last) >= 0)
    reuse_at(n.parent, last);  // using a page uses the pages above it
}

// Identifies pages by content and depth: names would cost more than everything else here.
inline void Gittins::follow(Index index) noexcept {
  const GittinsRecord& record = records_[index];
  const Node& n = node(index);
  const std::uint8_t* page = n.key.data();
  for (std::uint32_t depth = n.start + 1; depth <= n.end(); ++depth, page += around_.page_bytes) {
    const std::uint64_t some = load_word(page, std::min<std::size_t>(around_.page_bytes, 8)) + depth;
    if ((some * 0xD6E8FEB86659FD93ull >> 32) % kFollowed) continue;
    follow(PageName::mix(page, around_.page_bytes) + depth, depth == n.end() ? kind_of_end(record) : record.kind);
  }
}

inline void Gittins::follow(std::uint64_t page, int kind) noexcept {
  Recall::Entry entry;
  if (followed_.remove(page, &entry)) {
    note_life(entry);
    index_.reused(entry.note, now() - entry.time);
  }
  followed_.add({page, now(), static_cast<std::uint8_t>(kind)}, std::max(kLeastFollowing, kFollowing * capacity()),
                [this](const Recall::Entry& gone) { note_life(gone); });
}

// Counts the time of a followed page since its last use or, if that is shorter, since the last lesson.
inline void Gittins::note_life(const Recall::Entry& entry) noexcept {
  const std::uint64_t since = when(entry.time);
  index_.lived(entry.note, since < lesson_ ? static_cast<std::uint32_t>(lesson_ - since) : 0, now() - entry.time);
}

inline void Gittins::learn() noexcept {
  followed_.each([this](const Recall::Entry& entry) { note_life(entry); });
  index_.learn(followed_a_request());
  leaves_.reorder(index_);
  lesson_ = now_;
  next_lesson_ = now_ + std::max({kLesson, capacity() / 4, std::uint64_t{2 * followed_.size()}});
}

}  // namespace mainstem
