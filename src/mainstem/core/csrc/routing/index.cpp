#include "routing/index.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace mainstem {

namespace {

constexpr std::uint32_t kMostWorkers = 1 << 16, kMostStores = 1 << 12;
constexpr std::size_t kRead = 8;  // blocks that are fetched from memory before they are read

bool any(const std::uint64_t* bits, std::size_t words) {
  return std::any_of(bits, bits + words, [](std::uint64_t word) { return word != 0; });
}

}  // namespace

RoutingIndex::RoutingIndex(SipKey key, std::uint32_t page_tokens, std::uint64_t capacity)
    : key_(key), prefixes_(key, page_tokens), page_tokens_(page_tokens), capacity_(capacity), by_digest_(key.one) {
  require(page_tokens > 0 && page_tokens <= 1 << 20, "page_tokens", page_tokens, "1 to 1048576");
  require(capacity > 0 && capacity < kNoBlock, "capacity", capacity, "1 to 4294967294 pages");
}

// ---------------------------------------------------------------- workers

const RoutingIndex::Worker& RoutingIndex::at(WorkerId worker) const {
  require(known(worker), "worker", worker, "a worker that was added and not dropped");
  return *workers_[worker];
}

WorkerId RoutingIndex::add() {
  const auto free = std::find(workers_.begin(), workers_.end(), nullptr);
  const auto id = static_cast<WorkerId>(free - workers_.begin());
  require(id < kMostWorkers, "workers", id, "at most 65536");
  auto made = std::make_unique<Worker>(key_.two ^ id);
  widen(std::size_t{id} + 1);
  if (free == workers_.end())
    workers_.push_back(std::move(made));
  else
    *free = std::move(made);
  ++counts_.workers;
  return id;
}

void RoutingIndex::drop(WorkerId worker) {
  const std::uint64_t cleared = counts_.cleared;
  clear(worker);
  counts_.cleared = cleared;  // by nobody's event
  share_store(worker, 0);
  workers_[worker] = nullptr;
  --counts_.workers;
}

void RoutingIndex::share_store(WorkerId worker, std::uint32_t store) {
  Worker& of = at(worker);
  require(store < kMostStores, "store", store, "below 4096");
  while (stores_.size() <= store)
    stores_.emplace_back(wide_);
  const std::uint64_t bit = std::uint64_t{1} << worker % 64;
  stores_[of.store][worker / 64] &= ~bit;
  of.store = store;
  if (store) stores_[store][worker / 64] |= bit;
}

// Makes the bits of each block wide enough.
void RoutingIndex::widen(std::size_t workers) {
  if (workers <= wide_ * 64) return;
  const std::size_t wide = wide_ * 2, stride = kHead + kColumns * wide;
  std::vector<std::vector<std::uint64_t>> stores = stores_;
  for (std::vector<std::uint64_t>& store : stores)
    store.resize(wide);
  Array<std::uint64_t> words;
  const std::size_t blocks = words_.size() / stride_;
  words.resize(blocks * stride, 0);
  for (std::size_t b = 0; b < blocks; ++b) {
    std::memcpy(&words[b * stride], &words_[b * stride_], sizeof(Block));
    for (std::size_t place = 0; place < kColumns; ++place)
      std::memcpy(&words[b * stride + kHead + place * wide], &words_[b * stride_ + kHead + place * wide_],
                  wide_ * sizeof(std::uint64_t));
  }
  words_.swap(words);
  stores_.swap(stores);
  wide_ = wide;
  stride_ = stride;
}

// ---------------------------------------------------------------- blocks

Digest RoutingIndex::space(std::span<const std::uint8_t> name) const {
  return SipHash::of(key_, Digest{}, name.data(), name.size());
}

void RoutingIndex::set(BlockIndex block, Medium place, WorkerId worker) {
  bits(block, place)[worker / 64] |= std::uint64_t{1} << worker % 64;
}

void RoutingIndex::unset(BlockIndex block, Medium place, WorkerId worker) {
  bits(block, place)[worker / 64] &= ~(std::uint64_t{1} << worker % 64);
}

BlockIndex RoutingIndex::find(Digest digest) {
  const BlockTable::Slot* slot =
      by_digest_.find(digest.one, [&](const BlockTable::Slot& each) { return block(each.block).digest == digest; });
  return slot ? slot->block : kNoBlock;
}

// Finds several consecutive pages of one path, which follow the block `last` (or none); returns the last of them. Pages
// of a path were mostly stored one after another, and so their blocks are neighbours: then no look-up in the table is
// needed. Otherwise the slots of all pages are prefetched, and then all their blocks, so that memory latencies overlap.
BlockIndex RoutingIndex::find(std::span<const Digest> digests, BlockIndex last, BlockIndex* found) {
  std::size_t i = 0;
  for (; i < digests.size() && (std::size_t{last} + 1) * stride_ < words_.size(); found[i++] = ++last) {
    const std::size_t next = (std::size_t{last} + 1) * stride_;
    __builtin_prefetch(words_.begin() + next + kRead * stride_);
    if (block(last + 1).digest != digests[i]) break;
  }
  if (i == digests.size()) return last;
  for (std::size_t j = i; j < digests.size(); ++j)
    by_digest_.prefetch(digests[j].one);
  for (std::size_t j = i; j < digests.size(); ++j) {
    const BlockTable::Slot* slot = by_digest_.find(digests[j].one);  // another one of the same word is seen below
    found[j] = slot ? slot->block : kNoBlock;
    if (slot) __builtin_prefetch(&words_[slot->block * stride_]);
  }
  for (std::size_t j = i; j < digests.size(); ++j)
    if (found[j] != kNoBlock && block(found[j]).digest != digests[j]) found[j] = find(digests[j]);
  return found[digests.size() - 1];
}

BlockIndex RoutingIndex::find_or_make(Digest digest, std::uint32_t depth, Digest space) {
  BlockIndex at = find(digest);
  if (at != kNoBlock) return at;
  by_digest_.reserve();
  if (free_ == kNoBlock) {
    const std::size_t end = words_.size() + stride_;
    if (end > words_.capacity()) words_.reserve(with_spare(end));
    at = static_cast<BlockIndex>(words_.size() / stride_);
    words_.resize(end, 0);
  } else {
    at = free_;
    free_ = block(at).next;
  }
  block(at) = {digest, depth, static_cast<std::uint32_t>(space.one), 0, kNoBlock};
  by_digest_.insert(digest.one, at, 0);
  ++blocks_;
  return at;
}

// Frees a block that nobody has.
void RoutingIndex::release(BlockIndex at) noexcept {
  if (any(bits(at, Medium::device), kColumns * wide_)) return;
  BlockTable::Slot* slot =
      by_digest_.find(block(at).digest.one, [at](const BlockTable::Slot& each) { return each.block == at; });
  assert(slot);
  by_digest_.erase(slot);
  block(at).digest = {};  // no page is found in a block that is free
  block(at).next = free_;
  free_ = at;
  --blocks_;
}

// ---------------------------------------------------------------- events

void RoutingIndex::store(WorkerId worker, Medium medium, Digest space, std::optional<std::uint64_t> parent,
                         std::span<const std::uint64_t> hashes, std::span<const std::uint32_t> tokens) {
  Worker& to = at(worker);
  assert(medium != Medium::expected);
  if (tokens.size() != hashes.size() * page_tokens_) {
    ++counts_.malformed;
    return;
  }
  Digest before = space;
  std::uint32_t depth = 0;
  if (parent) {
    const BlockTable::Slot* slot = to.held.find(*parent);
    if (!slot) {
      counts_.orphans += hashes.size();
      return;
    }
    const Block& above = block(slot->block);
    if (above.space != static_cast<std::uint32_t>(space.one)) {  // a page never continues one of another namespace
      ++counts_.malformed;
      return;
    }
    before = above.digest;
    depth = above.depth + 1;
  }
  ++stamp_;
  PrefixNames names(prefixes_, before, depth, tokens);
  for (std::size_t page = 0; page < hashes.size(); ++page) {
    to.held.reserve();
    const BlockIndex at = find_or_make(names.next(), depth++, space);
    if (!store_one(&to, worker, medium, hashes[page], at)) {
      release(at);
      counts_.conflicts += hashes.size() - page;
      return;
    }
    forget_some();
  }
}

// Returns whether the worker uses this hash for this block alone, and this block for this hash alone.
bool RoutingIndex::store_one(Worker* to, WorkerId worker, Medium medium, std::uint64_t hash, BlockIndex at) {
  BlockTable::Slot* slot = to->held.find(hash);
  if (slot ? slot->block != at
           : has(at, Medium::device, worker) || has(at, Medium::host, worker) || has(at, Medium::storage, worker))
    return false;
  if (!slot) {
    slot = to->held.insert(hash, at, 0);
    ++pairs_;
  }
  slot->more |= 1u << static_cast<std::uint32_t>(medium);
  set(at, medium, worker);
  block(at).stamp = stamp_;
  unexpect(to, worker, at);
  ++counts_.stored;
  return true;
}

void RoutingIndex::remove(WorkerId worker, Medium medium, std::span<const std::uint64_t> hashes) {
  Worker& of = at(worker);
  assert(medium != Medium::expected);
  const std::uint32_t bit = 1u << static_cast<std::uint32_t>(medium);
  for (const std::uint64_t hash : hashes) {
    BlockTable::Slot* slot = of.held.find(hash);
    if (!slot || !(slot->more & bit)) {
      ++counts_.unknown;
      continue;
    }
    const BlockIndex at = slot->block;
    slot->more &= ~bit;
    if (!slot->more) {
      of.held.erase(slot);
      --pairs_;
    }
    unset(at, medium, worker);
    unexpect(&of, worker, at);
    release(at);
    ++counts_.removed;
  }
}

void RoutingIndex::clear(WorkerId worker) {
  Worker& of = at(worker);
  for (const BlockTable::Slot& slot : of.held.slots()) {
    if (slot.block == kNoBlock) continue;
    for (const Medium medium : {Medium::device, Medium::host, Medium::storage})
      unset(slot.block, medium, worker);
    release(slot.block);
  }
  for (const BlockTable::Slot& slot : of.expected.slots()) {
    if (slot.block == kNoBlock) continue;
    unset(slot.block, Medium::expected, worker);
    release(slot.block);
  }
  pairs_ -= of.held.size() + (of.dues.size() - of.first);
  of.held.clear();
  of.expected.clear();
  of.dues.clear();
  of.first = 0;
  ++counts_.cleared;
}

// ---------------------------------------------------------------- what is expected

void RoutingIndex::expect(WorkerId worker, Digest space, std::span<const std::uint32_t> tokens, double now_s) {
  Worker& to = at(worker);
  ++stamp_;
  const std::size_t pages = tokens.size() / page_tokens_;
  PrefixNames names(prefixes_, space, 0, tokens);
  for (std::size_t page = 0; page < pages; ++page) {
    to.expected.reserve();
    if (to.dues.size() == to.dues.capacity()) to.dues.reserve(with_spare(to.dues.size() + 1));
    const BlockIndex at = find_or_make(names.next(), static_cast<std::uint32_t>(page), space);
    block(at).stamp = stamp_;
    if (has(at, Medium::device, worker)) continue;  // as events say
    to.dues.push_back({now_s, at, ++to.number});
    ++pairs_;
    BlockTable::Slot* slot = to.expected.find(at);
    if (slot)
      slot->more = to.number;
    else
      to.expected.insert(at, at, to.number);
    set(at, Medium::expected, worker);
    forget_some();
  }
}

void RoutingIndex::unexpect(Worker* of, WorkerId worker, BlockIndex at) noexcept {
  if (!has(at, Medium::expected, worker)) return;
  of->expected.erase(of->expected.find(at));
  unset(at, Medium::expected, worker);
}

void RoutingIndex::expire(double now_s) {
  for (WorkerId worker = 0; worker < workers_.size(); ++worker) {
    Worker* of = workers_[worker].get();
    while (of && of->first < of->dues.size() && of->dues[of->first].sent_s + of->expect_s <= now_s)
      pop_due(of, worker, &counts_.expired);
  }
}

// Removes the oldest due. Its page is not expected any more, unless an event came, or the page was sent again.
void RoutingIndex::pop_due(Worker* of, WorkerId worker, std::uint64_t* count) noexcept {
  const Due due = of->dues[of->first++];
  --pairs_;
  if (of->first * 2 > of->dues.size()) {
    of->dues.erase(of->dues.begin(), of->dues.begin() + static_cast<std::ptrdiff_t>(of->first));
    of->first = 0;
  }
  const BlockTable::Slot* slot = of->expected.find(due.block);
  if (!slot || slot->more != due.number) return;
  unexpect(of, worker, due.block);
  release(due.block);
  ++*count;
}

// ---------------------------------------------------------------- forgetting

void RoutingIndex::forget_some() noexcept {
  while (pairs_ > capacity_) {
    Worker* most = nullptr;
    WorkerId id = 0;
    std::size_t largest = 0;
    for (WorkerId worker = 0; worker < workers_.size(); ++worker) {
      Worker* one = workers_[worker].get();
      const std::size_t size = one ? std::max(one->held.size(), one->dues.size() - one->first) : 0;
      if (size <= largest) continue;
      most = one;
      id = worker;
      largest = size;
    }
    assert(most);
    if (most->held.size() < largest)
      pop_due(most, id, &counts_.forgotten);
    else
      forget_held(most, id);
  }
}

// Of some pages, forgets the one that was stored or sent longest ago; of one request's, the last.
void RoutingIndex::forget_held(Worker* of, WorkerId worker) noexcept {
  BlockTable::Slot* worst = nullptr;
  for (std::size_t i = 0; i < kSampled; ++i) {
    BlockTable::Slot* slot = of->held.used_from(of->hand);
    of->hand = of->held.place_of(slot) + 1;
    if (worst) {
      const Block &one = block(slot->block), &other = block(worst->block);
      const std::uint32_t age = stamp_ - one.stamp, oldest = stamp_ - other.stamp;
      if (age < oldest || (age == oldest && one.depth <= other.depth)) continue;
    }
    worst = slot;
  }
  const BlockIndex at = worst->block;
  of->held.erase(worst);
  --pairs_;
  for (const Medium medium : {Medium::device, Medium::host, Medium::storage})
    unset(at, medium, worker);
  release(at);
  ++counts_.forgotten;
}

// ---------------------------------------------------------------- requests

// Ends the prefixes of workers that lack a block, which is the page with this number.
inline void RoutingIndex::end_where_missing(BlockIndex at, std::size_t page, Depths* found) {
  for (std::size_t word = 0; word < wide_; ++word) {
    std::array<std::uint64_t, kMedia> there{};
    if (at != kNoBlock) {
      const std::uint64_t* own = bits(at, Medium::device) + word;
      there[0] = own[0] | own[3 * wide_];
      there[1] = there[0] | own[wide_];
      there[2] = there[1] | own[2 * wide_];
      for (std::size_t store = 1; store < stores_.size(); ++store)
        if (stores_[store][word] & ~there[2] && shared(at, stores_[store])) there[2] |= stores_[store][word];
    }
    std::uint64_t* alive = &alive_[word * kMedia];
    if (!((alive[0] & ~there[0]) | (alive[1] & ~there[1]) | (alive[2] & ~there[2]))) continue;
    for (std::size_t medium = 0; medium < kMedia; ++medium) {
      for (std::uint64_t gone = alive[medium] & ~there[medium]; gone; gone &= gone - 1)
        found->pages[medium][word * 64 + std::countr_zero(gone)] = static_cast<std::uint32_t>(page);
      alive[medium] &= there[medium];
    }
  }
}

// No worker has ended yet.
void RoutingIndex::begin_match(Depths* found) {
  for (std::vector<std::uint32_t>& depths : found->pages)
    depths.assign(workers_.size(), 0);
  alive_.assign(wide_ * kMedia, 0);
  for (WorkerId worker = 0; worker < workers_.size(); ++worker)
    for (std::size_t medium = 0; workers_[worker] && medium < kMedia; ++medium)
      alive_[worker / 64 * kMedia + medium] |= std::uint64_t{1} << worker % 64;
}

void RoutingIndex::match(Digest space, std::span<const std::uint32_t> tokens, Depths* found) {
  const std::size_t pages = tokens.size() / page_tokens_;
  begin_match(found);
  std::array<BlockIndex, PrefixNames::kAtOnce> blocks;
  PrefixNames names(prefixes_, space, 0, tokens);
  BlockIndex last = kNoBlock;
  std::size_t page = 0;
  while (page < pages && any(alive_.data(), alive_.size())) {
    const std::span<const Digest> some = names.some();
    last = find(some, last, blocks.data());
    for (std::size_t i = 0; i < some.size(); ++i, ++page)
      end_where_missing(blocks[i], page, found);
  }
  for (WorkerId worker = 0; worker < workers_.size(); ++worker)
    for (std::size_t medium = 0; medium < kMedia; ++medium)
      if (alive_[worker / 64 * kMedia + medium] >> worker % 64 & 1)
        found->pages[medium][worker] = static_cast<std::uint32_t>(pages);
}

// Whether any of the workers of a store has a block there.
bool RoutingIndex::shared(BlockIndex at, const std::vector<std::uint64_t>& store) {
  const std::uint64_t* stored = bits(at, Medium::storage);
  for (std::size_t word = 0; word < wide_; ++word)
    if (stored[word] & store[word]) return true;
  return false;
}

// ---------------------------------------------------------------- counts and check

IndexCounts RoutingIndex::counts() const {
  IndexCounts counts = counts_;
  counts.blocks = blocks_;
  counts.bytes = words_.bytes() + by_digest_.bytes();
  for (const std::unique_ptr<Worker>& worker : workers_) {
    if (!worker) continue;
    counts.held += worker->held.size();
    counts.expected += worker->expected.size();
    counts.bytes += worker->held.bytes() + worker->expected.bytes() + worker->dues.capacity() * sizeof(Due);
  }
  return counts;
}

void RoutingIndex::check() const {
  const auto fail = [](const char* what) { throw Corrupt{std::string("index: ") + what}; };
  const std::size_t made = words_.size() / stride_;
  if (stride_ != kHead + kColumns * wide_ || workers_.size() > wide_ * 64) fail("a block has a bit for each worker");
  std::vector<std::uint64_t> bits(made * kColumns * wide_);
  std::uint64_t pairs = 0, known = 0;
  std::vector<std::vector<std::uint64_t>> stores(stores_.size(), std::vector<std::uint64_t>(wide_));
  const auto note = [&](BlockIndex at, std::size_t place, WorkerId worker) {
    if (at >= made) fail("a worker has no block");
    bits[(at * kColumns + place) * wide_ + worker / 64] |= std::uint64_t{1} << worker % 64;
  };
  for (WorkerId worker = 0; worker < workers_.size(); ++worker) {
    if (!workers_[worker]) continue;
    const Worker& of = *workers_[worker];
    ++known;
    if (of.store) stores.at(of.store)[worker / 64] |= std::uint64_t{1} << worker % 64;
    pairs += of.held.size() + (of.dues.size() - of.first);
    for (const BlockTable::Slot& slot : of.held.slots())
      for (std::size_t place = 0; slot.block != kNoBlock && place < kMedia; ++place)
        if (slot.more >> place & 1) note(slot.block, place, worker);
    for (const BlockTable::Slot& slot : of.expected.slots())
      if (slot.block != kNoBlock) note(slot.block, kMedia, worker);
    check_worker(of);
  }
  if (known != counts_.workers) fail("workers are counted");
  if (stores != stores_) fail("a store has exactly the workers that share it");
  if (pairs != pairs_ || pairs > capacity_) fail("pairs are not what workers have, or more than the capacity");
  if (counts_.removed > counts_.stored) fail("more was removed than stored");
  std::size_t used = 0;
  for (std::size_t at = 0; at < made; ++at) {
    const std::uint64_t* own = &words_[at * stride_ + kHead];
    if (!std::equal(own, own + kColumns * wide_, bits.begin() + static_cast<std::ptrdiff_t>(at * kColumns * wide_)))
      fail("the bits of a block are not what workers have");
    used += any(own, kColumns * wide_);
  }
  std::size_t listed = 0, free = 0;
  for (const BlockTable::Slot& slot : by_digest_.slots())
    if (slot.block != kNoBlock && slot.word == block(slot.block).digest.one) ++listed;
  if (used != blocks_ || listed != blocks_ || by_digest_.size() != blocks_) fail("blocks in use are not those listed");
  for (BlockIndex at = free_; at != kNoBlock && free <= made; at = block(at).next, ++free)
    if (block(at).digest != Digest{}) fail("a page is found in a block that is free");
  if (blocks_ + free != made) fail("a block is in use or free");
}

// A page has one hash, and counts as expected once, until its newest due is due or an event says where it is.
void RoutingIndex::check_worker(const Worker& of) const {
  const auto fail = [](const char* what) { throw Corrupt{std::string("index: ") + what}; };
  std::unordered_set<BlockIndex> held, on_device;
  for (const BlockTable::Slot& slot : of.held.slots()) {
    if (slot.block == kNoBlock) continue;
    if (!slot.more || !held.insert(slot.block).second) fail("a page of a worker is somewhere, under one hash");
    if (slot.more & 1) on_device.insert(slot.block);
  }
  std::unordered_map<BlockIndex, std::uint32_t> newest;
  for (std::size_t due = of.first; due < of.dues.size(); ++due)
    newest[of.dues[due].block] = of.dues[due].number;
  for (const BlockTable::Slot& slot : of.expected.slots()) {
    if (slot.block == kNoBlock) continue;
    const auto due = newest.find(slot.block);
    if (due == newest.end() || due->second != slot.more) fail("what is expected ends with its newest due");
    if (on_device.contains(slot.block)) fail("what is on the device is not expected there");
  }
}

}  // namespace mainstem
