#include "replay/holders.h"

#include <algorithm>
#include <utility>

namespace mainstem {

void Holders::apply(std::size_t shard, std::vector<Change>* changes) {
  Shard& own = shards_[shard];
  for (const Change& change : *changes)
    change.came ? own.add(change) : own.remove(change);
  changes->clear();
}

std::span<const Holder> Holders::of(std::uint64_t name, Holder* one) const {
  const Shard& own = shards_[Changes::shard(name)];
  const BlockTable::Slot* slot = own.table.find(name);
  if (!slot) return {};
  if (slot->block & kList) return own.lists[slot->block ^ kList];
  *one = as_holder(slot->block);
  return {one, 1};
}

std::size_t Holders::bytes() const {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    total += shard.table.bytes() + shard.free.capacity() * sizeof(std::uint32_t);
    for (const std::vector<Holder>& list : shard.lists)
      total += sizeof(list) + list.capacity() * sizeof(Holder);
  }
  return total;
}

void Holders::Shard::add(const Change& change) {
  const std::uint32_t tier = 1u << change.tier;
  BlockTable::Slot* slot = table.find(change.name);
  if (!slot) {
    table.reserve();
    table.insert(change.name, as_value({change.replica, tier}), 0);
  } else if (!(slot->block & kList) && as_holder(slot->block).replica() == change.replica) {
    slot->block |= tier;
  } else {
    add_to_list(&slot->block, change);
  }
}

void Holders::Shard::add_to_list(std::uint32_t* value, const Change& change) {
  if (!(*value & kList)) {
    std::uint32_t number = static_cast<std::uint32_t>(lists.size());
    if (free.empty()) {
      lists.emplace_back();
    } else {
      number = free.back();
      free.pop_back();
    }
    lists[number].assign(1, as_holder(*value));
    *value = kList | number;
  }
  std::vector<Holder>& list = lists[*value ^ kList];
  const auto at = std::lower_bound(list.begin(), list.end(), change.replica,
                                   [](Holder holder, std::uint32_t replica) { return holder.replica() < replica; });
  if (at != list.end() && at->replica() == change.replica)
    *at = {change.replica, at->tiers() | 1u << change.tier};
  else
    list.insert(at, {change.replica, 1u << change.tier});
}

void Holders::Shard::remove(const Change& change) {
  BlockTable::Slot* slot = table.find(change.name);
  if (!slot) return;  // another path has the same name of 64 bits
  if (!(slot->block & kList)) {
    if (as_holder(slot->block).replica() == change.replica) slot->block &= ~(1u << change.tier);
    if (as_holder(slot->block).tiers() == 0) table.erase(slot);
    return;
  }
  const std::uint32_t number = slot->block ^ kList;
  std::vector<Holder>& list = lists[number];
  const auto at = std::lower_bound(list.begin(), list.end(), change.replica,
                                   [](Holder holder, std::uint32_t replica) { return holder.replica() < replica; });
  if (at == list.end() || at->replica() != change.replica) return;
  *at = {change.replica, at->tiers() & ~(1u << change.tier)};
  if (at->tiers() == 0) list.erase(at);
  if (list.size() > 1) return;
  slot->block = as_value(list[0]);  // one is left
  std::vector<Holder>().swap(list);
  free.push_back(number);
}

}  // namespace mainstem
