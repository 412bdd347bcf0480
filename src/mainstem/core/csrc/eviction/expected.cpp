// Which node goes next where somebody has said when prefixes are used next; see expected.h.
#include "eviction/expected.h"

#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "eviction/eviction.h"

namespace mainstem {

namespace {

constexpr int kAtOnce = 16;  // nodes that one choice may spare, or give back

// What a lost bet costs under a policy that counts uses: what comes back has lost its counts, too. When those policies
// would have dropped a page is not known: it is taken to be when as many pages have gone as there are.
constexpr double kCountsLost = 2;

}  // namespace

// From now on, nodes have names and expectations.
void Eviction::begin_expected() {
  auto begun = std::make_unique<Expected>(nodes_.nodes(), tick_);
  begun->reserve(room_);
  std::vector<bool> named(nodes_.nodes().size(), remembers_);
  names_.resize(room_);
  std::vector<Index> path;
  for (Index node = 1; node < named.size(); ++node) {
    if (!nodes_[node].live) continue;
    for (Index at = node; at != kNone && !named[at]; at = nodes_[at].parent)
      path.push_back(at);
    for (; !path.empty(); path.pop_back()) {
      names_[path.back()] = name_of(nodes_[path.back()]);
      named[path.back()] = true;
    }
  }
  expected_ = std::move(begun);
}

void Eviction::expect(Index node, Account account, double now, double due) {
  if (!cells_.component(0).leaf_only()) return;
  if (!expected_) begin_expected();
  Index root = node;
  while (!nodes_[root].root())
    root = nodes_[root].parent;
  expected_->tell_time(now);
  expected_->own(root, account);
  expected_->say(node, due, account);
  refresh(node, kAdvised);
}

// A candidate takes its place among the expected ones. Returns whether the policy must not see it.
bool Eviction::offer_expected(Index node, std::size_t column) {
  if (column != kAdvised) return false;
  if (!is_expected(node, column)) {
    expected_->drop(node);
    return false;
  }
  expected_->offer(node);
  if (!expected_->withdrawn(node)) return false;
  drop_from_policy(node, column);
  return true;
}

void Eviction::end_advice(Index node) {
  expected_->forget(node);
  refresh(node, kAdvised);
}

// A node is about to lose its pages on the device.
void Eviction::end_expected(Index node, bool was_present) noexcept {
  if (was_present) note_bets(node, nodes_[node].pages);
  expected_->pass_up(node, nodes_[node].parent);
  expected_->forget(node);
}

void Eviction::note_bets(Index node, std::uint32_t pages) noexcept {
  expected_->went += pages;
  if (expected_->wager != node) return;
  const Surroundings around{nodes_.nodes(), names_, tick_, nodes_.page_bytes, 0, false};
  const double rank = rank_alone(node);
  around.each_page(node, pages, [&](std::uint64_t page) { expected_->ledger.bet(page, expected_->by, rank); });
  expected_->wager = kNone;
}

// When the policy alone evicts a node, as a number: its rank, or how many pages will have gone.
double Eviction::rank_alone(Index node) const {
  if (!policy_.keeps_order) return number(expected_->went + cells_.counts(kAdvised).present);
  const Node& n = nodes_[node];
  const Rank rank = policy_.rank(n, n.accessed, protected_hits_);
  return std::ldexp(rank.major, 40) + rank.minor;
}

// A request asks for pages: bets on those that are not there are lost.
void Eviction::ask_expected(Index root, Index deepest, std::uint64_t root_name, Bytes key) noexcept {
  const std::size_t page_bytes = nodes_.page_bytes;
  Ledger& ledger = expected_->ledger;
  ledger.asked(root == kNone ? kNobody : expected_->at(root).account, key.size() / page_bytes);
  std::uint64_t name = deepest == kNone ? root_name : names_[deepest];
  for (std::size_t at = deepest == kNone ? 0 : nodes_[deepest].end() * page_bytes; at < key.size(); at += page_bytes) {
    name = PageName::after(name, key.data() + at, page_bytes);
    if (!ledger.lose(name, policy_.keeps_order ? 1 : kCountsLost)) return;  // what goes by one bet goes from its end
  }
}

// What waits longest of the policy's choice and of what is expected. The policy's choice is spared if it is expected.
Index Eviction::choose_expected() {
  Expected& all = *expected_;
  const auto account = [&](Index node) { return all.at(node).account; };
  all.wager = kNone;
  for (Index node; (node = all.overdue()) != kNone;)
    end_advice(node);
  const Index first = by_policy(kAdvised);
  if (first != kNone && goes_first(first, kAdvised)) return first;

  Index next = first;
  for (int spared = 0; spared < kAtOnce && next != kNone && all.holds(next); ++spared) {
    if (!all.ledger.may_spare() || all.ledger.room(account(next)) < nodes_[next].pages) break;
    all.withdraw(next);
    put(next, kAdvised);
    next = by_policy(kAdvised);
  }
  if (next == kNone && unranked(kAdvised) != kNone) return kNone;  // it is asked for a rank first
  all.ledger.pass(!policy_.keeps_order ? number(all.went)
                  : next == kNone      ? std::numeric_limits<double>::infinity()
                                       : rank_alone(next));

  Index last = all.furthest();
  for (int ended = 0; last != kNone && all.ended(last); last = all.furthest()) {
    if (++ended > kAtOnce) return next == kNone ? last : next;
    end_advice(last);
  }
  if (last == kNone) return next == kNone ? by_policy(kAdvised) : next;
  if (const Index late = all.soonest(); late != kNone && all.wait(late) > all.wait(last)) last = late;
  const double room = all.ledger.room(account(last));
  if (next == kNone || (all.wait(last) > all.wait(next) && room >= 1)) {
    if (all.withdrawn(last)) return last;  // as the policy would
    all.wager = last;
    all.by = account(last);
    all.stake = room < 1 ? 1 : static_cast<std::uint64_t>(std::min(room, number(nodes_[last].pages)));
    if (next != kNone) all.pass_over(next, all.by);
    return last;
  }
  if (all.sparing() == kNobody) return next;
  all.wager = next;
  all.by = all.sparing();
  all.stake = nodes_[next].pages;
  return next;
}

}  // namespace mainstem
