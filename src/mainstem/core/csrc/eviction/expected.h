// Expected: announcements of when prefixes are used next, and how far they are believed.
//
//   due     when the prefix that ends with a node is used next, by the caller's clock
//   wait    from now to then. A node that is a minute late is taken to be two minutes away, and so is a node without an
//           announcement that was idle for a minute
//
// The node with the longest wait goes first. If the policy would take another node, that is a bet: the policy's node is
// spared, and the pages that go instead are remembered by name. The bet is lost if those are asked for while the policy
// would still have them; it is won if the spared ones are asked for. Each account may lose a small part of the pages
// that it asks for. Beyond that, the policy decides as without advice.
//
// When a child goes, its parent takes over the child's announcement, so that a whole context goes before another one is
// cut. It does not if others use the parent, too.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "eviction/order.h"
#include "eviction/policies/recall.h"
#include "structure/memory.h"
#include "structure/node.h"

namespace mainstem {

// The giver of advice; kNobody: no account.
using Account = std::uint8_t;
inline constexpr Account kNobody = 0, kAccounts = 255;

// The bets of all accounts. A page is one unit.
class Ledger {
 public:
  void asked(Account of, std::uint64_t pages) { accounts_[of].asked += number(pages); }
  // How many more pages an account may stake. Below 1: none.
  double room(Account of) const {
    const Balance& a = accounts_[of];
    const double left = (allowance(a) - a.lost) / chance(a);
    return of == kNobody ? 0 : left - number(std::max(a.gone, a.spared));
  }
  // Whether to wait for the outcome of its bets. An account that has lost half its allowance and has nothing left to
  // stake would block eviction.
  bool believed(Account of) const {
    return of != kNobody && (room(of) >= 1 || accounts_[of].lost <= allowance(accounts_[of]) / 2);
  }

  // The policy has as many pages that went as there are that it would have evicted: no more than that can be spared.
  bool may_spare() const { return spared_ <= gone_.size(); }
  void spare(Account of, std::uint64_t pages) { accounts_[of].spared += pages, spared_ += pages; }
  void end_sparing(Account of, std::uint64_t pages) { accounts_[of].spared -= pages, spared_ -= pages; }
  // A page went in place of another one; `rank` says for how long the policy would have kept it.
  void bet(std::uint64_t page, Account of, double rank) noexcept {
    Gone::Entry before;
    if (gone_.remove(page, &before)) settle(before, 0);
    gone_.add({page, rank, of}, kMostGone, [this](const Gone::Entry& entry) { settle(entry, 0); });
    accounts_[of].gone += gone_.contains(page);  // else there is no memory for it
  }
  // A page is asked for that is not there. Whether a bet on it is lost.
  bool lose(std::uint64_t page, double weight) noexcept {
    Gone::Entry entry;
    if (!gone_.remove(page, &entry)) return false;
    settle(entry, weight);
    return true;
  }
  // Spared pages are used: as many of the oldest bets are won.
  void win(std::uint64_t pages) noexcept {
    gone_.drop_oldest(
        pages, [](const Gone::Entry&) { return true; }, [this](const Gone::Entry& entry) { settle(entry, -1); });
  }
  // The policy has come to this rank: it would have evicted what is below, as far as it had to.
  void pass(double rank) noexcept {
    const std::uint64_t most = gone_.size() - std::min<std::uint64_t>(gone_.size(), spared_);
    const auto passed = [&](const Gone::Entry& entry) { return entry.time < rank; };
    gone_.drop_oldest(most, passed, [this](const Gone::Entry& entry) { settle(entry, 0); });
  }

  std::uint64_t won() const { return won_; }
  std::uint64_t lost() const { return lost_; }
  std::size_t bytes() const { return gone_.bytes(); }

 private:
  using Gone = Recall<double>;

  // kMayLose: the part of the requested pages that an account may lose. Gains count up to kMostGained times that, so
  // that a change for the worse is noticed soon. kPrior: bets that count as lost before there are others. kMemory:
  // after so many bets, earlier ones count half.
  static constexpr double kMayLose = 0.0015, kMostGained = 10, kPrior = 32, kMemory = 16384;
  static constexpr std::size_t kMostGone = 1u << 22;

  struct Balance {
    double asked = 0, lost = 0;         // less what was gained
    double settled = 0, unhappily = 0;  // bets, and those lost
    std::uint64_t gone = 0, spared = 0;
  };
  static double allowance(const Balance& a) { return kMayLose * a.asked; }
  static double chance(const Balance& a) { return (a.unhappily + kPrior) / (a.settled + kPrior); }  // of losing a bet

  void settle(const Gone::Entry& entry, double loss) noexcept {
    Balance& a = accounts_[entry.note];
    --a.gone;
    a.lost = std::max(a.lost + loss, -kMostGained * allowance(a));
    a.settled += 1;
    a.unhappily += loss > 0;
    won_ += loss < 0;
    lost_ += loss > 0;
    if (a.settled < kMemory) return;
    a.settled /= 2;
    a.unhappily /= 2;
  }

  std::array<Balance, kAccounts> accounts_{};
  Gone gone_;                 // pages that went by advice, the oldest first
  std::uint64_t spared_ = 0;  // pages that the policy would have evicted
  std::uint64_t won_ = 0, lost_ = 0;
};

struct Expectation {
  double due = 0, until = 0;  // until when it is believed
  std::uint64_t since = 0;    // the tick when it was said; a later use ends it
  std::uint32_t spared = 0;   // pages that were spared, while they are
  Account account = kNobody;
  bool said = false;
  bool passed = false;     // it was the policy's choice, and another went
  bool withdrawn = false;  // the same, and the policy does not know it any more
};

// The expectations by node, and those of candidates in order.
class Expected {
 public:
  explicit Expected(const Array<Node>& nodes, const std::uint64_t& tick) : nodes_(nodes), tick_(tick) {}

  void reserve(std::size_t nodes) {
    all_.resize(nodes);
    furthest_.reserve(nodes);
    soonest_.reserve(nodes);
  }
  std::size_t bytes() const { return all_.bytes() + furthest_.bytes() + soonest_.bytes() + ledger.bytes(); }

  const Expectation& at(Index node) const { return all_[node]; }
  bool holds(Index node) const { return all_[node].said && all_[node].since >= nodes_[node].accessed; }
  bool withdrawn(Index node) const { return all_[node].withdrawn; }
  bool offered(Index node) const { return furthest_.contains(node); }
  bool sound() const { return furthest_.sound() && soonest_.sound(); }

  void note_time(double now) {
    if (now <= now_) return;
    if (reported_) {
      seconds_ += now - now_;
      ticks_ += number(tick_ - reported_);
      if (ticks_ > kPaced) seconds_ /= 2, ticks_ /= 2;
    }
    now_ = now;
    reported_ = tick_;
  }
  double now() const { return now_; }
  // How long it is expected to take until a node is used.
  double wait(Index node) const {
    const double left = all_[node].due - now_;
    if (holds(node)) return std::max(left, -kLate * left);
    return kIdle * number(tick_ - nodes_[node].accessed) * seconds_ / std::max(1.0, ticks_);
  }

  void say(Index node, double due, Account account) {
    forget(node);
    all_[node].due = due;
    all_[node].until = due + std::max(due - now_, 0.0);
    all_[node].since = tick_;
    all_[node].account = account;
    all_[node].said = true;
  }
  // A child is gone: the later of the two announcements holds for the parent, unless others than the child's users use
  // it.
  void pass_up(Index child, Index parent) noexcept {
    const Expectation &below = all_[child], &above = all_[parent];
    if (!holds(child) || nodes_[parent].root() || nodes_[parent].hits > nodes_[child].hits + 1) return;
    if (above.said && (above.since > below.since || (above.since == below.since && above.due <= below.due))) return;
    const Expectation said = below;
    forget(parent);
    all_[parent] = {said.due, said.until, said.since, 0, said.account, true};
  }
  // A root remembers whose it is.
  void own(Index root, Account account) { all_[root].account = account; }

  // The node can be evicted, or cannot any more.
  void offer(Index node) noexcept { furthest_.put(node, {-all_[node].due, 0}, nodes_[node].start); }
  void withdraw(Index node) noexcept {
    Expectation& it = all_[node];
    spare(node, it.account);
    it.withdrawn = true;
    soonest_.put(node, {it.until, 0}, nodes_[node].start);
  }
  void pass_over(Index node, Account account) noexcept {
    if (all_[node].spared) return;
    all_[node].passed = true;
    if (!all_[node].said) all_[node].account = account;
  }
  void drop(Index node) noexcept {
    if (furthest_.contains(node)) furthest_.remove(node);
    if (soonest_.contains(node)) soonest_.remove(node);
    if (all_[node].spared) ledger.end_sparing(all_[node].account, all_[node].spared);
    all_[node].spared = 0;
    all_[node].withdrawn = false;
  }
  void forget(Index node) noexcept {
    drop(node);
    all_[node] = {};
  }
  void used(Index node) noexcept {
    const Expectation& it = all_[node];
    if (it.withdrawn || it.passed) ledger.win(nodes_[node].pages);
    if (it.said || it.passed) forget(node);
  }

  Index soonest() const { return soonest_.empty() ? kNone : soonest_.top(); }
  // Whether what was said of a node is over, or not believed.
  bool ended(Index node) const { return all_[node].until < now_ || !ledger.believed(all_[node].account); }
  Index furthest() const { return furthest_.empty() ? kNone : furthest_.top(); }
  // A withdrawn node whose time is up.
  Index overdue() const { return !soonest_.empty() && all_[soonest_.top()].until < now_ ? soonest_.top() : kNone; }
  Account sparing() const { return soonest_.empty() ? kNobody : all_[soonest_.top()].account; }

  Ledger ledger;
  std::uint64_t went = 0;  // pages that were evicted
  std::uint64_t at_once(Index node) const { return node == wager ? stake : std::numeric_limits<std::uint64_t>::max(); }

  Index wager = kNone;      // the victim, if it goes by advice
  Account by = kNobody;     // whose advice it is
  std::uint64_t stake = 0;  // how many of its pages may go

 private:
  static constexpr double kPaced = 4096;         // ticks over which their pace is averaged
  static constexpr double kLate = 2, kIdle = 2;  // see the top

  void spare(Index node, Account account) {
    if (all_[node].spared) return;
    all_[node].spared = nodes_[node].pages;
    ledger.spare(account, nodes_[node].pages);
  }

  const Array<Node>& nodes_;
  const std::uint64_t& tick_;
  Array<Expectation> all_;
  Order furthest_, soonest_;  // candidates by their due; withdrawn ones by the end of their time
  double now_ = 0, seconds_ = 0, ticks_ = 0;
  std::uint64_t reported_ = 0;
};

}  // namespace mainstem
