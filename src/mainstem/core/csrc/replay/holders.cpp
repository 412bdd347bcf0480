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
  if (own.values.empty()) return {};
  const std::uint32_t value = own.values[own.find(name)];
  if (value == kEmpty) return {};
  if (value & kList) return own.lists[value ^ kList];
  *one = as_holder(value);
  return {one, 1};
}

std::size_t Holders::bytes() const {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    total += shard.names.bytes() + shard.values.bytes() + shard.free.capacity() * sizeof(std::uint32_t);
    for (const std::vector<Holder>& list : shard.lists)
      total += sizeof(list) + list.capacity() * sizeof(Holder);
  }
  return total;
}

std::size_t Holders::Shard::find(std::uint64_t name) const {
  std::size_t slot = home(name);
  while (values[slot] != kEmpty && names[slot] != name)
    slot = next(slot);
  return slot;
}

void Holders::Shard::grow() {
  Array<std::uint64_t> old_names;
  Array<std::uint32_t> old_values;
  old_names.swap(names);
  old_values.swap(values);
  const std::size_t slots = std::max<std::size_t>(64, old_values.size() * 2);
  names.resize(slots, 0);
  values.resize(slots, kEmpty);
  for (std::size_t i = 0; i < old_values.size(); ++i) {
    if (old_values[i] == kEmpty) continue;
    const std::size_t slot = find(old_names[i]);
    names[slot] = old_names[i];
    values[slot] = old_values[i];
  }
}

void Holders::Shard::add(const Change& change) {
  if ((size + 1) * 4 > values.size() * 3) grow();
  const std::size_t slot = find(change.name);
  const std::uint32_t tier = 1u << change.tier;
  if (values[slot] == kEmpty) {
    names[slot] = change.name;
    values[slot] = as_value({change.replica, tier});
    ++size;
  } else if (!(values[slot] & kList) && as_holder(values[slot]).replica() == change.replica) {
    values[slot] |= tier;
  } else {
    add_to_list(slot, change);
  }
}

void Holders::Shard::add_to_list(std::size_t slot, const Change& change) {
  if (!(values[slot] & kList)) {
    std::uint32_t number = static_cast<std::uint32_t>(lists.size());
    if (free.empty()) {
      lists.emplace_back();
    } else {
      number = free.back();
      free.pop_back();
    }
    lists[number].assign(1, as_holder(values[slot]));
    values[slot] = kList | number;
  }
  std::vector<Holder>& list = lists[values[slot] ^ kList];
  const auto at = std::lower_bound(list.begin(), list.end(), change.replica,
                                   [](Holder holder, std::uint32_t replica) { return holder.replica() < replica; });
  if (at != list.end() && at->replica() == change.replica)
    *at = {change.replica, at->tiers() | 1u << change.tier};
  else
    list.insert(at, {change.replica, 1u << change.tier});
}

void Holders::Shard::remove(const Change& change) {
  if (size == 0) return;
  const std::size_t slot = find(change.name);
  if (values[slot] == kEmpty) return;  // another path has the same name of 64 bits
  if (!(values[slot] & kList)) {
    if (as_holder(values[slot]).replica() == change.replica) values[slot] &= ~(1u << change.tier);
    if (as_holder(values[slot]).tiers() == 0) erase(slot);
    return;
  }
  const std::uint32_t number = values[slot] ^ kList;
  std::vector<Holder>& list = lists[number];
  const auto at = std::lower_bound(list.begin(), list.end(), change.replica,
                                   [](Holder holder, std::uint32_t replica) { return holder.replica() < replica; });
  if (at == list.end() || at->replica() != change.replica) return;
  *at = {change.replica, at->tiers() & ~(1u << change.tier)};
  if (at->tiers() == 0) list.erase(at);
  if (list.size() > 1) return;
  values[slot] = as_value(list[0]);  // one is left
  std::vector<Holder>().swap(list);
  free.push_back(number);
}

// Moves back what follows, so that no search ends before it.
void Holders::Shard::erase(std::size_t slot) {
  std::size_t hole = slot;
  for (std::size_t i = next(slot); values[i] != kEmpty; i = next(i)) {
    const std::size_t from_home = (i - home(names[i])) & (values.size() - 1);
    if (from_home < ((i - hole) & (values.size() - 1))) continue;
    names[hole] = names[i];
    values[hole] = values[i];
    hole = i;
  }
  values[hole] = kEmpty;
  --size;
}

}  // namespace mainstem
