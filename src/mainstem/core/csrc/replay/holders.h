// Holders: which replicas hold a block, and on which tiers. Blocks are known by `path_name`, which covers all blocks
// before them, so a block has one place in all trees, and a tier that holds it holds those before it.
//
//   block 17  -> one replica: its number and tiers, in the slot itself
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

#include "structure/memory.h"

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
  static constexpr std::uint32_t kEmpty = ~std::uint32_t{0}, kList = 1u << 31;

  // Open addressing with linear probing. A value is a Holder, or kList and the number of a list.
  struct Shard {
    Array<std::uint64_t> names;
    Array<std::uint32_t> values;
    std::size_t size = 0;
    std::vector<std::vector<Holder>> lists;
    std::vector<std::uint32_t> free;

    std::size_t home(std::uint64_t name) const { return name & (values.size() - 1); }
    std::size_t next(std::size_t slot) const { return (slot + 1) & (values.size() - 1); }
    std::size_t find(std::uint64_t name) const;  // its slot, or the empty one where it would be
    void grow();
    void add(const Change& change);
    void remove(const Change& change);
    void erase(std::size_t slot);
    void add_to_list(std::size_t slot, const Change& change);
  };
  static std::uint32_t as_value(Holder holder) { return holder.replica() << Holder::kTiers | holder.tiers(); }
  static Holder as_holder(std::uint32_t value) {
    return {value >> Holder::kTiers, value & ((1u << Holder::kTiers) - 1)};
  }

  std::array<Shard, Changes::kShards> shards_;
};

}  // namespace mainstem
