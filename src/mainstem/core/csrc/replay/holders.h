// Holders: which replicas hold a block, and on which tiers. Blocks are known by `path_name`, which covers all blocks
// before them, so a block has one place in all trees, and a tier that holds it holds those before it.
//
//   block 17  -> one replica: its number and tiers, in the table itself
//   block 4   -> several: a list sorted by replica, beside the table
//
// Changes are collected while replicas serve, by shard, so that threads may apply them: each takes its shards. Knows no
// trees.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "routing/table.h"

namespace mainstem {

// The name of a block, from that of the block before it; 0 before the first. The blocks of a trace may repeat.
inline std::uint64_t path_name(std::uint64_t before, std::uint64_t block) {
  std::uint64_t name = (before + 1) * 0x9E3779B97F4A7C15ull + block;
  name = (name ^ name >> 32) * 0xD6E8FEB86659FD93ull;
  name = (name ^ name >> 32) * 0xD6E8FEB86659FD93ull;
  return name ^ name >> 32;
}

// A replica that holds a block: its number, and a bit for each of its tiers.
class Holder {
 public:
  static constexpr std::uint32_t kTiers = 3, kMost = 1u << 13;

  Holder() = default;
  Holder(std::uint32_t replica, std::uint32_t tiers) : bits_(static_cast<std::uint16_t>(replica << kTiers | tiers)) {}
  std::uint32_t replica() const { return bits_ >> kTiers; }
  std::uint32_t tiers() const { return bits_ & ((1u << kTiers) - 1); }
  bool operator==(const Holder&) const = default;

 private:
  std::uint16_t bits_ = 0;
};

struct Change {  // a block came to a tier of a replica, or left it
  std::uint64_t name;
  std::uint32_t replica;
  std::uint8_t tier;
  bool came;
};

class Changes {
 public:
  static constexpr std::size_t kShards = 16;  // by the first four bits of a name

  static std::size_t shard(std::uint64_t name) { return name >> 60; }
  void add(const Change& change) { shards_[shard(change.name)].push_back(change); }
  std::vector<Change>& of(std::size_t shard) { return shards_[shard]; }

 private:
  std::array<std::vector<Change>, kShards> shards_;
};

class Holders {
 public:
  void add(const Change& change) { shards_[Changes::shard(change.name)].add(change); }
  // Applies changes of one shard, in order, and forgets them. Threads may apply those of different shards.
  void apply(std::size_t shard, std::vector<Change>* changes);
  // Those that hold the block of this name, by number. A single one is written to `one`.
  std::span<const Holder> of(std::uint64_t name, Holder* one) const;
  std::size_t bytes() const;

 private:
  static constexpr std::uint32_t kList = 1u << 31;

  struct Shard {
    BlockTable table{0};  // by name: a Holder, or kList and the number of a list
    std::vector<std::vector<Holder>> lists;
    std::vector<std::uint32_t> free;  // lists without a block

    void add(const Change& change);
    void remove(const Change& change);
    void add_to_list(std::uint32_t* value, const Change& change);
  };
  static std::uint32_t as_value(Holder holder) { return holder.replica() << Holder::kTiers | holder.tiers(); }
  static Holder as_holder(std::uint32_t value) {
    return {value >> Holder::kTiers, value & ((1u << Holder::kTiers) - 1)};
  }

  std::array<Shard, Changes::kShards> shards_;
};

}  // namespace mainstem
