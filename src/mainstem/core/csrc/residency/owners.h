// Owners: whose the ids of a node are, how many each owner has, and how many it may have. An owner is a tenant, or what
// else names a group of namespaces; see owner_of(). Owner 0 is nobody: it has what was removed.
//
// An owner has a guarantee and a maximum for each column, in ids. Its ids up to the guarantee give way to nobody else;
// those beyond the maximum go first. Without shares there are no Owners.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "residency/cell.h"
#include "structure/errors.h"
#include "structure/memory.h"

namespace mainstem {

using OwnerId = std::uint32_t;
constexpr OwnerId kNoOwner = 0, kEverybody = ~OwnerId{0};  // the second asks for room whatever the shares are

struct CellCounts {  // in ids
  std::uint64_t present = 0, locked = 0, in_flight = 0;
  bool operator==(const CellCounts&) const = default;

  // Counts the ids of a cell as what they are now: in (+1) or out (-1). An absent cell has none.
  void add(const Cell& cell, int by) {
    const std::uint64_t ids = static_cast<std::uint64_t>(by) * cell.ids.size();
    if (cell.in_flight()) {
      in_flight += ids;
    } else {
      present += ids;
      if (cell.locks) locked += ids;
    }
  }
};

struct Share {  // of one column, in ids
  std::uint64_t guaranteed = 0, maximum = std::numeric_limits<std::uint64_t>::max();
};
using Shares = std::vector<Share>;  // by column

// The encoded namespace without its adapter, up to the end of its first field: a tenant, a salt or a name. Empty where
// there is none. The encoding is that of namespaces.py.
inline std::string_view owner_of(std::string_view ns) {
  const auto field = [](std::string_view fields) {
    std::uint64_t length = 0;
    for (std::size_t at = 8; at > 0; --at)
      length = length << 8 | (at < fields.size() ? static_cast<std::uint8_t>(fields[at]) : 0u);
    return fields.size() < 9 ? fields.size() : 9 + std::min<std::uint64_t>(length, fields.size() - 9);
  };
  if (ns.starts_with('a')) ns.remove_prefix(field(ns));
  return ns.empty() || std::string_view("tsnb").find(ns[0]) == std::string_view::npos ? ns.substr(0, 0)
                                                                                      : ns.substr(0, field(ns));
}

class Owners {
 public:
  // `others`: the shares of an owner with a name that is not among `named`.
  Owners(std::size_t columns, Shares others, const std::map<std::string, Shares>& named)
      : others_(std::move(others)), spare_(columns), columns_(columns) {
    require(others_.size() == columns, "shares", others_.size(), "one for each component on each tier");
    accounts_.push_back({{}, Shares(columns), std::vector<CellCounts>(columns), 0, true});
    for (const auto& [name, shares] : named) {
      require(shares.size() == columns, "shares", shares.size(), "one for each component on each tier");
      if (owner_of(name) != name || numbers_.contains(name))
        throw BadValue{"owner", name, "the name of an owner, once"};
      Account& account = accounts_[enter(name)];
      account.shares = shares;
      account.stays = true;
    }
  }

  // The number of a namespace's owner, which is known from now on while it has nodes.
  OwnerId enter(std::string_view ns) {
    const std::string name(owner_of(ns));
    const auto [at, added] = numbers_.try_emplace(name, kNoOwner);
    if (!added) return at->second;
    try {
      Account fresh{name, name.empty() ? Shares(columns_) : others_, std::vector<CellCounts>(columns_), 0, false};
      if (free_.empty()) {
        accounts_.reserve(accounts_.size() + 1);
        free_.reserve(accounts_.size() + 1);  // nothing below can fail
        free_.push_back(static_cast<OwnerId>(accounts_.size()));
        accounts_.emplace_back();
      }
      const OwnerId owner = free_.back();
      accounts_[owner] = std::move(fresh);
      free_.pop_back();
      return at->second = owner;
    } catch (...) {
      numbers_.erase(at);
      throw;
    }
  }
  OwnerId find(std::string_view ns) const {  // kNoOwner: it has nothing
    const auto at = numbers_.find(std::string(owner_of(ns)));
    return at == numbers_.end() ? kNoOwner : at->second;
  }
  std::size_t size() const { return accounts_.size(); }
  const std::string& name(OwnerId owner) const { return accounts_[owner].name; }
  std::vector<std::string> names() const {  // of those that have nodes or shares of their own
    std::vector<std::string> names;
    for (const auto& [name, owner] : numbers_)
      names.push_back(name);
    return names;
  }

  // ---- nodes
  void reserve(std::size_t nodes) { owner_.resize(nodes, kNoOwner); }
  OwnerId of(std::uint32_t node) const { return owner_[node]; }
  void own(std::uint32_t node, OwnerId owner) noexcept {
    owner_[node] = owner;
    ++accounts_[owner].nodes;
  }
  void disown(std::uint32_t node) noexcept {
    const OwnerId owner = std::exchange(owner_[node], kNoOwner);
    Account& account = accounts_[owner];
    if (--account.nodes || account.stays || owner == kNoOwner) return;
    numbers_.erase(account.name);
    free_.push_back(owner);  // there is room: it had a number
  }

  // ---- counts
  const CellCounts& counts(OwnerId owner, std::size_t column) const { return accounts_[owner].counts[column]; }
  const Share& share(OwnerId owner, std::size_t column) const { return accounts_[owner].shares[column]; }
  template <class Change>
  void count(std::uint32_t node, std::size_t column, Change change) {
    const OwnerId owner = owner_[node];
    const std::uint64_t before = yields(owner, column);
    change(accounts_[owner].counts[column]);
    spare_[column] += yields(owner, column) - before;
  }
  std::uint64_t evictable(OwnerId owner, std::size_t column) const {
    const CellCounts& has = counts(owner, column);
    return has.present - has.locked;
  }
  std::uint64_t beyond_guarantee(OwnerId owner, std::size_t column) const {
    return beyond(counts(owner, column).present, share(owner, column).guaranteed);
  }
  std::uint64_t beyond_maximum(OwnerId owner, std::size_t column, std::uint64_t more = 0) const {
    return beyond(counts(owner, column).present + more, share(owner, column).maximum);
  }
  // How many ids can be evicted for an owner: all of its own, and of the others what exceeds their guarantees.
  std::uint64_t available(OwnerId owner, std::size_t column) const {
    return spare_[column] + evictable(owner, column) - yields(owner, column);
  }

  // For check(): whether each owner has as many nodes as `nodes` says, and a number and a name if it has any, or stays;
  // whether all other numbers are free. Roots have owners, too.
  bool sound(const std::vector<std::size_t>& nodes) const {
    std::vector<bool> free(accounts_.size());
    for (const OwnerId owner : free_) {
      if (owner == kNoOwner || free[owner]) return false;
      free[owner] = true;
    }
    if (accounts_.size() != 1 + numbers_.size() + free_.size()) return false;
    for (const auto& [name, owner] : numbers_)
      if (free[owner] || accounts_[owner].name != name) return false;
    for (OwnerId owner = 1; owner < accounts_.size(); ++owner) {
      const Account& account = accounts_[owner];
      if (!free[owner] && (account.nodes != nodes[owner] || !(account.nodes || account.stays))) return false;
      if (free[owner] && nodes[owner]) return false;
    }
    return true;
  }

 private:
  struct Account {
    std::string name;
    Shares shares;
    std::vector<CellCounts> counts;  // by column
    std::size_t nodes = 0;
    bool stays = false;  // its shares are its own
  };

  static std::uint64_t beyond(std::uint64_t has, std::uint64_t limit) { return has - std::min(has, limit); }
  std::uint64_t yields(OwnerId owner, std::size_t column) const {
    return std::min(evictable(owner, column), beyond_guarantee(owner, column));
  }

  const Shares others_;
  std::vector<Account> accounts_;  // by number
  std::unordered_map<std::string, OwnerId> numbers_;
  std::vector<OwnerId> free_;
  std::vector<std::uint64_t> spare_;  // by column: what all owners together yield to others
  Array<OwnerId> owner_;              // by node
  const std::size_t columns_;
};

}  // namespace mainstem
