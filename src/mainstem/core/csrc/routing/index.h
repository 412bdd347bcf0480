// RoutingIndex: which worker has which block, on which medium, as their events say. A block is a page of tokens.
//
//   events of a worker   hash -> block         one table for each worker; hashes are names that it chose
//   a request's tokens   digest -> block       one table for all: 128 bits that name the namespace and all pages
//
//   a block   | digest | page number, namespace | stamp | workers on device | on host | in storage | expected |
//                                                         one bit for each worker
//
// Tokens are not kept. Two prefixes are the same block if their digests are equal. The digests have a key that never
// leaves the process, so nobody else can construct two equal ones; by chance, two of 2^32 blocks are equal with a
// probability of 2^-65. Hashes of events name blocks of one worker only, so no worker can change another's blocks.
//
// A block is expected on a worker that was sent its tokens, until an event of the worker says what is there, or for as
// long as the worker's expectations last.
//
// A full index forgets: first the blocks that were stored or sent longest ago, and of those the end of a path. It then
// knows fewer blocks than there are, and never wrong ones. It knows neither times of requests nor costs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "routing/prefixes.h"
#include "routing/table.h"
#include "structure/counters.h"
#include "structure/errors.h"
#include "structure/memory.h"
#include "tree/siphash.h"

namespace mainstem {

using WorkerId = std::uint32_t;

enum class Medium : std::uint32_t { device, host, storage, expected };
inline constexpr std::uint32_t kColumns = 4, kMedia = 3;

#define MAINSTEM_INDEX_COUNTS(COUNT)                                                                \
  COUNT(workers, "Workers known.")                                                                  \
  COUNT(blocks, "Distinct pages that anybody has, or is expected to have.")                         \
  COUNT(held, "Pages that workers have, each counted for each of them.")                            \
  COUNT(expected, "The same of pages that they were sent and are expected to have.")                \
  COUNT(bytes, "Memory of the index.")                                                              \
  COUNT(stored, "Pages that events stored.")                                                        \
  COUNT(removed, "Pages that events removed.")                                                      \
  COUNT(cleared, "Events that cleared all of a worker.")                                            \
  COUNT(orphans, "Pages stored after one that is not known: ignored.")                              \
  COUNT(unknown, "Pages removed from where they were not: ignored.")                                \
  COUNT(malformed, "Events that make no sense: ignored.")                                           \
  COUNT(conflicts, "Pages whose hash names another page, or that have another hash, too: ignored.") \
  COUNT(expired, "Expected pages that no event confirmed in time.")                                 \
  COUNT(forgotten, "Pages forgotten because the index was full.")
MAINSTEM_COUNTERS(IndexCounts, NoCounters, MAINSTEM_INDEX_COUNTS);

// Pages of a prompt that each worker has from its beginning, by worker: on the device or expected there; there or on
// the host; there or in storage.
struct Depths {
  std::array<std::vector<std::uint32_t>, kMedia> pages;
};

class RoutingIndex {
 public:
  // `capacity`: pairs of a worker and a block, held or expected.
  RoutingIndex(SipKey key, std::uint32_t page_tokens, std::uint64_t capacity);
  RoutingIndex(const RoutingIndex&) = delete;
  RoutingIndex& operator=(const RoutingIndex&) = delete;

  // ---- workers
  WorkerId add();
  void drop(WorkerId worker);
  // Expected pages count for this long. 0 or more seconds, perhaps infinitely many.
  void expect_for(WorkerId worker, double seconds) { at(worker).expect_s = seconds; }
  // Workers with the same number share a store: what one has there, all have. 0: a store of its own.
  void share_store(WorkerId worker, std::uint32_t store);

  // ---- events; `space` names the namespace
  Digest space(std::span<const std::uint8_t> name) const;
  void store(WorkerId worker, Medium medium, Digest space, std::optional<std::uint64_t> parent,
             std::span<const std::uint64_t> hashes, std::span<const std::uint32_t> tokens);
  void remove(WorkerId worker, Medium medium, std::span<const std::uint64_t> hashes);
  void clear(WorkerId worker);
  void malformed(WorkerId worker) { at(worker), ++counts_.malformed; }

  // ---- requests
  void expect(WorkerId worker, Digest space, std::span<const std::uint32_t> tokens, double now_s);
  void expire(double now_s);
  void match(Digest space, std::span<const std::uint32_t> tokens, Depths* found);

  bool known(WorkerId worker) const { return worker < workers_.size() && workers_[worker]; }
  std::size_t worker_ids() const { return workers_.size(); }  // all ids are below
  std::uint32_t page_tokens() const { return page_tokens_; }
  IndexCounts counts() const;
  void check() const;  // throws Corrupt

 private:
  struct Due {
    double sent_s;
    BlockIndex block;
    std::uint32_t number;
  };
  struct Worker {
    explicit Worker(std::uint64_t seed) : held(seed), expected(seed) {}
    BlockTable held;      // hash -> block; more: media as bits
    BlockTable expected;  // block -> block; more: the number of its newest due
    std::vector<Due> dues;
    std::size_t first = 0;  // of `dues` that count
    std::uint32_t number = 0, store = 0;
    std::size_t hand = 0;  // where forgetting goes on
    double expect_s = 0;
  };
  struct Block {  // the beginning of its words
    Digest digest;
    std::uint32_t depth, space, stamp, next;
  };
  static constexpr std::size_t kHead = sizeof(Block) / sizeof(std::uint64_t);
  static constexpr std::size_t kSampled = 16;  // pages of which one is forgotten

  const Worker& at(WorkerId worker) const;
  Worker& at(WorkerId worker) { return const_cast<Worker&>(std::as_const(*this).at(worker)); }
  Block& block(BlockIndex block) { return *reinterpret_cast<Block*>(&words_[block * stride_]); }
  const Block& block(BlockIndex block) const { return *reinterpret_cast<const Block*>(&words_[block * stride_]); }
  std::uint64_t* bits(BlockIndex block, Medium place) {
    return &words_[block * stride_ + kHead + static_cast<std::size_t>(place) * wide_];
  }
  bool has(BlockIndex block, Medium place, WorkerId worker) {
    return bits(block, place)[worker / 64] >> worker % 64 & 1;
  }
  void set(BlockIndex block, Medium place, WorkerId worker);
  void unset(BlockIndex block, Medium place, WorkerId worker);
  BlockIndex find(Digest digest);
  BlockIndex find(std::span<const Digest> digests, BlockIndex last, BlockIndex* found);
  BlockIndex find_or_make(Digest digest, std::uint32_t depth, Digest space);
  void release(BlockIndex block) noexcept;
  void widen(std::size_t workers);
  bool store_one(Worker* to, WorkerId worker, Medium medium, std::uint64_t hash, BlockIndex block);
  void unexpect(Worker* of, WorkerId worker, BlockIndex block) noexcept;
  void pop_due(Worker* of, WorkerId worker, std::uint64_t* count) noexcept;
  void forget_some() noexcept;
  void forget_held(Worker* of, WorkerId worker) noexcept;
  void begin_match(Depths* found);
  void end_where_missing(BlockIndex at, std::size_t page, Depths* found);
  bool shared(BlockIndex at, const std::vector<std::uint64_t>& store);
  void check_worker(const Worker& of) const;

  SipKey key_;
  PrefixDigests prefixes_;
  std::uint32_t page_tokens_;
  std::uint64_t capacity_, pairs_ = 0;  // held and due
  std::vector<std::unique_ptr<Worker>> workers_;
  std::size_t wide_ = 1;                       // words of one place's bits
  std::size_t stride_ = kHead + kColumns * 1;  // words of a block
  Array<std::uint64_t> words_;
  std::size_t blocks_ = 0;  // in use
  BlockIndex free_ = kNoBlock;
  BlockTable by_digest_;
  std::uint32_t stamp_ = 0;
  IndexCounts counts_;
  std::vector<std::vector<std::uint64_t>> stores_;  // the workers of each store, as bits
  std::vector<std::uint64_t> alive_;  // during a match, by word and medium: workers that had all pages so far
};

}  // namespace mainstem
