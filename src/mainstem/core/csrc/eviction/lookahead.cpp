#include "eviction/lookahead.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace mainstem {

namespace {

constexpr int kAtOnce = 16;  // nodes that one choice may spare, or give back

// The cost of a lost bet under a policy that counts uses: a page that comes back has lost its counts, too. When such a
// policy would have dropped a page is not known; it is taken to be when as many pages have gone as there are.
constexpr double kCountsLost = 2;

}  // namespace

// From now on, nodes have names and expectations.
void Lookahead::begin() {
  const Array<Node>& nodes = std::as_const(order_.nodes_).nodes();
  auto begun = std::make_unique<Expected>(nodes, order_.tick_);
  begun->reserve(order_.room_);
  std::vector<bool> named(nodes.size(), order_.remembers_);
  order_.names_.resize(order_.room_);
  std::vector<Index> path;
  for (Index node = 1; node < named.size(); ++node) {
    if (!nodes[node].live) continue;
    for (Index at = node; at != kNone && !named[at]; at = nodes[at].parent)
      path.push_back(at);
    for (; !path.empty(); path.pop_back()) {
      order_.names_[path.back()] = order_.name_of(nodes[path.back()]);
      named[path.back()] = true;
    }
  }
  order_.expected_ = std::move(begun);
  all_ = order_.expected_.get();
}

void Lookahead::expect(Index node, Account account, double now, double due) {
  if (!all_) begin();
  Index root = node;
  while (!order_.nodes_[root].root())
    root = order_.nodes_[root].parent;
  all_->note_time(now);
  all_->own(root, account);
  all_->say(node, due, account);
  order_.refresh(node, kAdvised);
}

bool Lookahead::offer(Index node, std::size_t column) {
  if (column != kAdvised) return false;
  if (!all_->holds(node) || order_.goes_first(node, column)) {
    all_->drop(node);
    return false;
  }
  all_->offer(node);
  if (!all_->withdrawn(node)) return false;
  drop_from_policy(node);
  return true;
}

void Lookahead::drop_from_policy(Index node) {
  const std::uint32_t queue = order_.queues(kAdvised).queue(node);
  if (queue == order_.queue_count_) return;
  order_.order(kAdvised, queue).remove(node);
  if (order_.replacement(kAdvised)) order_.replacement(kAdvised)->withdrawn(node);
}

void Lookahead::end(Index node) {
  all_->forget(node);
  order_.refresh(node, kAdvised);
}

void Lookahead::gone(Index node, bool was_present) noexcept {
  if (was_present) trim(node, order_.nodes_[node].pages);
  all_->pass_up(node, order_.nodes_[node].parent);
  all_->forget(node);
}

void Lookahead::trim(Index node, std::uint32_t pages) noexcept {
  all_->went += pages;
  if (all_->wager != node) return;
  const Structure& nodes = order_.nodes_;
  const Surroundings around{nodes.nodes(), order_.names_, order_.tick_, nodes.page_bytes};
  const double rank = rank_alone(node);
  around.each_page(node, pages, [&](std::uint64_t page) { all_->ledger.bet(page, all_->by, rank); });
  all_->wager = kNone;
}

// When the policy alone evicts a node, as a number: its rank, or how many pages will have gone.
double Lookahead::rank_alone(Index node) const {
  if (!order_.policy_.keeps_order) return number(all_->went + order_.cells_.counts(kAdvised).present);
  const Node& n = order_.nodes_[node];
  const Rank rank = order_.policy_.rank(n, n.accessed, order_.protected_hits_);
  return std::ldexp(rank.major, 40) + rank.minor;
}

void Lookahead::ask(std::string_view ns, Index deepest, std::uint64_t root_name, Bytes key) noexcept {
  const std::size_t page_bytes = order_.nodes_.page_bytes;
  const Index root = order_.nodes_.find_root(ns);
  all_->ledger.asked(root == kNone ? kNobody : all_->at(root).account, key.size() / page_bytes);
  const double weight = order_.policy_.keeps_order ? 1 : kCountsLost;
  std::uint64_t name = deepest == kNone ? root_name : order_.names_[deepest];
  std::size_t at = deepest == kNone ? 0 : order_.nodes_[deepest].end() * page_bytes;
  for (; at < key.size(); at += page_bytes) {
    name = PageName::after(name, key.data() + at, page_bytes);
    if (!all_->ledger.lose(name, weight)) return;  // what goes by one bet goes from its end
  }
}

Index Lookahead::choose() {
  Expected& all = *all_;
  const auto account = [&](Index node) { return all.at(node).account; };
  all.wager = kNone;
  for (Index node; (node = all.overdue()) != kNone;)
    end(node);
  const Index first = order_.choose(kAdvised);
  if (first != kNone && order_.goes_first(first, kAdvised)) return first;

  Index next = first;
  for (int spared = 0; spared < kAtOnce && next != kNone && all.holds(next); ++spared) {
    if (!all.ledger.may_spare() || all.ledger.room(account(next)) < order_.nodes_[next].pages) break;
    all.withdraw(next);
    order_.refresh(next, kAdvised);
    next = order_.choose(kAdvised);
  }
  if (next == kNone && order_.unranked(kAdvised) != kNone) return kNone;  // it is asked for a rank first
  all.ledger.pass(!order_.policy_.keeps_order ? number(all.went)
                  : next == kNone             ? std::numeric_limits<double>::infinity()
                                              : rank_alone(next));

  Index last = all.furthest();
  for (int ended = 0; last != kNone && all.ended(last); last = all.furthest()) {
    if (++ended > kAtOnce) return next == kNone ? last : next;
    end(last);
  }
  if (last == kNone) return next == kNone ? order_.choose(kAdvised) : next;
  if (const Index late = all.soonest(); late != kNone && all.wait(late) > all.wait(last)) last = late;
  const double room = all.ledger.room(account(last));
  if (next == kNone || (all.wait(last) > all.wait(next) && (room >= 1 || all.withdrawn(last)))) {
    if (all.withdrawn(last)) return last;  // as the policy would
    all.wager = last;
    all.by = account(last);
    all.stake = room < 1 ? 1 : static_cast<std::uint64_t>(std::min(room, number(order_.nodes_[last].pages)));
    if (next != kNone) all.pass_over(next, all.by);
    return last;
  }
  if (all.sparing() == kNobody) return next;
  all.wager = next;
  all.by = all.sparing();
  all.stake = order_.nodes_[next].pages;
  return next;
}

}  // namespace mainstem
