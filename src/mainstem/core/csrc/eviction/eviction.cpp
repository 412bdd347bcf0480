#include "eviction/eviction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "eviction/lookahead.h"

namespace mainstem {

namespace {

const Policy& find_policy(std::string_view name) {
  for (const Policy& policy : kPolicies)
    if (policy.name == name) return policy;
  std::string names;
  for (const Policy& policy : kPolicies)
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  throw BadValue{"policy", std::string(name), "one of " + names};
}

std::uint64_t root_name(std::string_view ns) {
  return PageName::mix(reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
}

}  // namespace

Eviction::Eviction(Structure& nodes, const Residency& cells, std::string_view policy, std::uint32_t protected_hits)
    : nodes_(nodes),
      cells_(cells),
      policy_(find_policy(policy)),
      protected_hits_(protected_hits),
      remembers_(policy_.make && cells.rows[0].per_page()),
      has_standings_(!std::all_of(cells.rows.begin(), cells.rows.end(), std::mem_fn(&Component::leaf_only))),
      has_one_order_(!remembers_) {
  replacements_.resize(cells.columns);
  const Surroundings around{nodes.nodes(), names_, tick_, nodes.page_bytes};
  for (std::uint32_t tier = 0; remembers_ && tier < cells.tiers; ++tier)
    replacements_[cells.column_of(0, tier)] = policy_.make(around);
  if (remembers_) queue_count_ = replacements_[0]->queues();
  orders_.resize(queue_count_ * cells.columns);
  inflation_.resize(cells.columns);
}

bool Eviction::tells_recency() const {
  if (remembers_ || !cells_.component(0).leaf_only()) return false;
  return !policy_.rank || policy_.rank(Node{}, 1, 1) != policy_.rank(Node{}, 2, 1);
}

std::size_t Eviction::bytes() const {
  std::size_t total = standings_.bytes() + names_.bytes() + (expected_ ? expected_->bytes() : 0);
  for (const Order& order : orders_)
    total += order.bytes();
  for (const auto& replacement : replacements_)
    if (replacement) total += replacement->bytes();
  return total + (shares_ ? shares_->bytes() : 0);
}

// ---------------------------------------------------------------- owners

void Eviction::share_out() {
  auto shares = std::make_unique<ShareOrders>(cells_);
  shares->reserve(std::max(nodes_.nodes().capacity(), nodes_.nodes().size()));
  shares_ = std::move(shares);
  has_one_order_ = false;
  for (Index node = 1; node < nodes_.nodes().size(); ++node)
    for (std::size_t column = 0; nodes_[node].live && column < cells_.columns; ++column) {
      if (!cells_.candidate(node, column)) continue;
      const bool ranked = ranks_itself() || !orders_[column].contains(node);
      const Rank rank = ranked ? rank_of(node, column, nodes_[node].accessed) : orders_[column].rank(node);
      shares_->put(node, column, rank, nodes_[node].start);
    }
}

// ---------------------------------------------------------------- orders

inline Rank Eviction::rank_of(Index node, std::size_t column, std::uint64_t accessed) const {
  const Node& n = nodes_[node];
  if (n.removed || n.demoted || !cells_.component(column).leaf_only()) [[unlikely]]
    return rank_by_standing(node, column, accessed);
  return policy_.rank ? policy_.rank(n, accessed, protected_hits_) : Rank{kUnranked, 0};
}

[[gnu::noinline]] Rank Eviction::rank_by_standing(Index node, std::size_t column, std::uint64_t accessed) const {
  const std::uint64_t used = cells_.component(column).leaf_only() ? accessed : standing(node, column).used;
  if (is_demoted(node, column)) return {std::numeric_limits<double>::lowest() / 2, number(used)};  // after removed ones
  if (goes_first(node, column)) return {std::numeric_limits<double>::lowest(), number(used)};
  if (cells_.component(column).weighs) return {standing(node, column).worth, number(used)};
  return policy_.rank ? policy_.rank(nodes_[node], used, protected_hits_) : Rank{kUnranked, 0};
}

Place Eviction::place_of(Index node, std::size_t column, std::uint64_t accessed) const {
  const Replacement* const at = replacement(column);
  return at && !goes_first(node, column) ? at->place(node, accessed) : Place{rank_of(node, column, accessed)};
}

std::uint64_t Eviction::used(Index node, std::size_t column) const {
  return cells_.component(column).leaf_only() ? nodes_[node].accessed : standing(node, column).used;
}

// Whether a cell is evicted before all others of its kind, whatever the policy: removed and demoted nodes, superseded
// states where savings do not count, and window pages before the windows of all prefixes that have ended so far. A
// window that ends with a node may begin inside it: then the pages before the window are evicted first, and
// pages_together() says how many there are.
bool Eviction::goes_first(Index node, std::size_t column) const {
  const Component& row = cells_.component(column);
  if (nodes_[node].removed || is_demoted(node, column)) return true;
  if (row.leaf_only()) return false;
  if (standing(node, column).worth == 0) return true;
  return row.per_page() && nodes_[node].start < cells_.first_needed(node, column);
}

// Policies that remember, shares and advice have functions of their own, so that the others do not pay for them.
inline void Eviction::put(Index node, std::size_t column) {
  if (!has_one_order_) [[unlikely]]
    put_in_queue(node, column);
  else
    orders_[column].put(node, rank_of(node, column, nodes_[node].accessed), nodes_[node].start);
}

inline void Eviction::drop(Index node, std::size_t column) {
  if (!has_one_order_) [[unlikely]]
    drop_from_queue(node, column);
  else if (orders_[column].contains(node))
    orders_[column].remove(node);
}

[[gnu::noinline]] void Eviction::put_in_queue(Index node, std::size_t column) {
  const Node& n = nodes_[node];
  if (shares_) shares_->put(node, column, rank_of(node, column, n.accessed), n.start);
  if (expected_ && Lookahead(*this).offer(node, column)) return;
  const Place place = place_of(node, column, n.accessed);
  const std::uint32_t before = queues(column).queue(node);
  if (before < queue_count_ && before != place.queue) order(column, before).remove(node);
  order(column, place.queue).put(node, place.rank, n.start);
  if (replacement(column)) replacement(column)->offered(node);
}

[[gnu::noinline]] void Eviction::drop_from_queue(Index node, std::size_t column) {
  if (shares_) shares_->remove(node, column);
  if (expected_ && column == kAdvised) expected_->drop(node);
  const std::uint32_t queue = queues(column).queue(node);
  if (queue == queue_count_) return;
  order(column, queue).remove(node);
  if (replacement(column)) replacement(column)->withdrawn(node);
}

// Drops an external rank; the policy is asked for a new one.
void Eviction::refresh(Index node, std::size_t column) noexcept {
  if (cells_.candidate(node, column))
    put(node, column);
  else
    drop(node, column);
}

void Eviction::touch(Index node, std::uint64_t tick) {
  nodes_[node].accessed = tick;
  for (std::size_t column = 0; column < cells_.columns; ++column)
    if (cells_.candidate(node, column)) put(node, column);
}

// ---------------------------------------------------------------- nodes come, go, are split and joined

void Eviction::reserve(std::size_t nodes) {
  room_ = nodes;
  if (has_standings_) standings_.resize(nodes * cells_.columns);
  for (Order& order : orders_)
    order.reserve(nodes);
  if (listens()) names_.resize(nodes);
  if (shares_) shares_->reserve(nodes);
  if (expected_) expected_->reserve(nodes);
  for (const auto& replacement : replacements_)
    if (replacement) replacement->reserve(nodes);
}

void Eviction::made(Index node, std::int32_t priority) noexcept {
  Node& n = nodes_[node];
  if (!n.root()) {
    n.priority = priority;
    n.created = n.accessed = tick_;
  }
  if (listens()) names_[node] = name_of(n);
  if (expected_) expected_->forget(node);
}

std::uint64_t Eviction::name_of(const Node& n) const {
  return n.root() ? root_name(text(n.key)) : PageName::of(names_[n.parent], n.key.data(), n.pages, nodes_.page_bytes);
}

void Eviction::renew(Index node, std::int32_t priority) noexcept {
  Node& n = nodes_[node];
  n.created = n.accessed = tick_;
  n.hits = 0;
  n.priority = priority;
  n.forked = false;
  n.demoted = 0;
  if (expected_) expected_->forget(node);
}

// The upper half is new. A window's cell in it is worth something only if the window that ends at the lower half
// reaches that far.
void Eviction::split(Index upper, Index lower) noexcept {
  const Node& n = nodes_[lower];
  if (listens()) names_[upper] = PageName::above(names_[lower], n.key.data(), n.pages, nodes_.page_bytes);
  if (expected_) expected_->forget(upper);
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    if (cells_.component(column).per_page()) {
      if (has_standings_) {
        standing(upper, column) = standing(lower, column);
        if (cells_.first_needed(lower, column) >= nodes_[upper].end()) standing(upper, column).worth = 0;
      }
      if (cells_.cell(lower, column).present() && replacement(column)) replacement(column)->split(upper, lower);
    }
    refresh(upper, column);
    refresh(lower, column);
  }
}

// Two nodes may be joined if the order cannot tell: they have the same rank, and no window that counts lies in them.
bool Eviction::may_join(Index upper, Index lower) const {
  const Node& u = nodes_[upper];
  const Node& l = nodes_[lower];
  if (!ranks_itself() || u.hits != l.hits || u.priority != l.priority || u.demoted != l.demoted) return false;
  if (expected_ && expected_->holds(upper)) return false;  // what is expected of the lower holds for the upper, too
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    if (!cells_.cell(upper, column).present()) continue;
    if (cells_.component(column).begins_late() && (standing(upper, column).worth || standing(lower, column).worth))
      return false;
    if (replacement(column) && !replacement(column)->alike(upper, lower)) return false;
  }
  // Using a child uses its parent, see gone().
  const std::uint64_t accessed = std::max<std::uint64_t>(u.accessed, l.accessed);
  if (!remembers_)
    return !cells_.component(0).leaf_only() || rank_of(upper, 0, accessed) == rank_of(lower, 0, l.accessed);
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
    const std::size_t column = cells_.column_of(0, tier);
    if (cells_.cell(upper, column).present() &&
        place_of(upper, column, accessed) != place_of(lower, column, l.accessed))
      return false;
  }
  return true;
}

void Eviction::join(Index upper, Index lower) noexcept {
  nodes_[lower].accessed = std::max<std::uint64_t>(nodes_[upper].accessed, nodes_[lower].accessed);
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    drop(upper, column);
    if (cells_.component(column).per_page()) {
      if (cells_.cell(upper, column).present() && replacement(column)) replacement(column)->joined(upper, lower);
      if (has_standings_)
        standing(lower, column).used = std::max<std::uint64_t>(used(upper, column), used(lower, column));
    }
    refresh(lower, column);
  }
}

void Eviction::refresh(Index node) noexcept {
  for (std::size_t column = 0; column < cells_.columns; ++column)
    refresh(node, column);
}

void Eviction::inherit(Index node, std::uint64_t accessed) noexcept {
  if (nodes_[node].accessed < accessed) touch(node, accessed);
}

// ---------------------------------------------------------------- ids come and go

void Eviction::came(Index node, std::size_t column) noexcept {
  if (remembers_ && cells_.cell(node, column).present()) [[unlikely]]
    if (replacement(column)) replacement(column)->came(node);
  if (!cells_.component(column).leaf_only()) [[unlikely]]
    note_standing(node, column);
  refresh(node, column);
  refresh(nodes_[node].parent, column);
}

void Eviction::arrived(Index node, std::size_t column) noexcept {
  if (replacement(column)) replacement(column)->came(node);
  refresh(node, column);
}

void Eviction::gone(Index node, std::size_t column, bool was_present) noexcept {
  Node& n = nodes_[node];
  if (was_present && replacement(column)) replacement(column)->gone(node, n.pages);
  if (!cells_.component(column).per_page())
    n.forked = n.forked && !cells_.empty_of(node, cells_.component_index(column));
  if (was_present && cells_.component(column).weighs) restore_above(node, column);
  const Index parent = n.parent;
  if (expected_ && column == kAdvised) Lookahead(*this).gone(node, was_present);
  refresh(node, column);
  refresh(parent, column);
  // Using a child uses its parent. An insertion after a node does not mark all nodes above: that would cost O(depth),
  // and it matters only now that the parent may be evicted next.
  if (cells_.component(column).leaf_only()) inherit(parent, n.accessed);
}

void Eviction::trim(Index node, std::uint32_t tier, std::uint32_t pages) noexcept {
  if (!listens()) return;
  const std::size_t column = cells_.column_of(0, tier);
  if (cells_.cell(node, column).present()) {
    if (remembers_) replacements_[column]->gone(node, pages);
    if (expected_ && column == kAdvised) Lookahead(*this).trim(node, pages);
  }
  const Node& n = nodes_[node];
  const std::size_t kept = std::size_t{n.pages - pages} * nodes_.page_bytes;
  names_[node] = PageName::above(names_[node], n.key.data() + kept, pages, nodes_.page_bytes);
}

// ---------------------------------------------------------------- use

void Eviction::asked(std::string_view ns, const Walk& path, Bytes key) noexcept {
  const Index deepest = path.empty() ? kNone : path.back().node;
  key = key.first(key.size() / nodes_.page_bytes * nodes_.page_bytes);
  const std::uint64_t root = root_name(ns);
  if (expected_) Lookahead(*this).ask(ns, deepest, root, key);
  for (std::uint32_t tier = 0; remembers_ && tier < cells_.tiers; ++tier)
    replacement(cells_.column_of(0, tier))->asked(root, deepest, key);
  for (const Step& step : path)
    for (std::uint32_t tier = 0; remembers_ && tier < cells_.tiers; ++tier) {
      const std::size_t column = cells_.column_of(0, tier);
      if (cells_.cell(step.node, column).present()) replacement(column)->used(step.node);
    }
}

void Eviction::found(const Walk& path) noexcept {
  for (const Step& step : path) {
    Node& n = nodes_[step.node];
    ++n.hits;
    n.accessed = tick_;
    n.demoted = 0;
    if (expected_) expected_->used(step.node);
    if (!cells_.single_cell || &step == &path.back()) touch(step.node, tick_);  // otherwise inner nodes have no rank
  }
}

void Eviction::visited(Index node, std::int32_t priority) noexcept {
  nodes_[node].priority = std::max(nodes_[node].priority, priority);
  nodes_[node].demoted = 0;
  if (expected_) expected_->used(node);
  touch(node, tick_);
}

void Eviction::demote(Index node, std::uint32_t tiers) noexcept {
  nodes_[node].demoted = std::max<std::uint32_t>(nodes_[node].demoted, tiers) & 3u;
  refresh(node);
}

// This does not count as a hit, and policies that remember are not notified.
void Eviction::in_use(Index node, std::uint32_t tier) noexcept {
  ++tick_;
  if (cells_.single_cell && !remembers_)
    nodes_[node].accessed = tick_;  // it is locked, and so in no order
  else if (!remembers_)
    touch(node, tick_);
  for (std::uint32_t c = 0; has_standings_ && c < cells_.components(); ++c) {
    const std::size_t column = cells_.column_of(c, tier);
    if (cells_.component(column).leaf_only()) continue;
    end_window(node, column, 0);
    if (cells_.component(column).per_page() || cells_.cell(node, column).absent()) continue;
    standing(node, column).used = tick_;
    refresh(node, column);
  }
}

// A prefix ends at a node: it uses the window and the state there, and no earlier ones.
void Eviction::ended(Index node, std::size_t column, double worth) noexcept {
  if (node == kNone || cells_.component(column).leaf_only()) return;
  end_window(node, column, worth);
  if (cells_.component(column).per_page() || cells_.cell(node, column).absent()) return;
  Standing& at = standing(node, column);
  if (at.uses < std::numeric_limits<std::uint8_t>::max()) ++at.uses;
  credit(node, column);
  refresh(node, column);
}

void Eviction::end_window(Index node, std::size_t column, double least) noexcept {
  if (!cells_.component(column).begins_late()) return;
  const std::uint32_t first = cells_.first_needed(node, column);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    Standing& at = standing(node, column);
    at.worth = std::max(at.worth, least);
    at.used = tick_;
    refresh(node, column);
  }
}

void Eviction::pass_window(Index node, std::size_t column) noexcept {
  if (!cells_.component(column).begins_late()) return;
  const std::uint32_t first = cells_.first_needed(node, column);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    if (standing(node, column).worth != kInserted) continue;
    standing(node, column).worth = 0;
    refresh(node, column);
  }
}

// A window or a state was put here.
[[gnu::noinline]] void Eviction::note_standing(Index node, std::size_t column) {
  standing(node, column).worth = 0;
  standing(node, column).uses = 0;
  credit(node, column);
  if (!cells_.component(column).per_page()) supersede_above(node, column);
}

std::uint32_t Eviction::saved_pages(Index node, std::size_t column) const {
  Index above = nodes_[node].parent;
  while (!nodes_[above].root() && cells_.cell(above, column).absent())
    above = nodes_[above].parent;
  return nodes_[node].end() - nodes_[above].end();
}

// A state was created or used. GreedyDual (Young 1994; Cao and Irani 1997): its worth is what it saves, plus an
// inflation that follows the worth of evicted states, so that unused states age. All states have one size and their
// savings grow with the pages, so pages stand for floating-point operations saved per byte.
void Eviction::credit(Index node, std::size_t column) {
  Standing& at = standing(node, column);
  at.used = tick_;
  if (cells_.component(column).per_page()) return;
  at.base = inflation_[column];
  at.superseded = false;
  at.worth = cells_.component(column).weighs ? worth_of_state(node, column) : kInserted;
}

// A state that was used often is used again sooner, but by far not in proportion: the fourth root of the uses was the
// best of several rules (docs/decisions.md).
double Eviction::worth_of_state(Index node, std::size_t column) const {
  const Standing& at = standing(node, column);
  const double likely = at.superseded ? kSuperseded : std::sqrt(std::sqrt(1.0 + at.uses));
  return at.base + likely * saved_pages(node, column);
}

// The state that the sequence up to `node` has grown past; kNone if there is none, or a sequence parts there or did.
Index Eviction::outgrown(Index node, std::size_t column) const {
  Index above = nodes_[node].parent;
  for (; !nodes_[above].root() && nodes_[above].children() == 1; above = nodes_[above].parent)
    if (!cells_.cell(above, column).absent()) break;
  return nodes_[above].root() || nodes_[above].children() > 1 || nodes_[above].forked ? kNone : above;
}

// A sequence has grown past a state. Its next turn starts from the new state; the old one serves only sequences that
// part in between.
void Eviction::supersede_above(Index node, std::size_t column) {
  const Index above = outgrown(node, column);
  if (above == kNone) return;
  Standing& at = standing(above, column);
  at.superseded = true;
  at.worth = cells_.component(column).weighs ? worth_of_state(above, column) : 0;
  refresh(above, column);
}

// The newest state of a sequence is gone: the next turn starts from the one before it.
void Eviction::restore_above(Index node, std::size_t column) {
  const Index above = outgrown(node, column);
  if (above == kNone || !standing(above, column).superseded) return;
  for (Index below = node; nodes_[below].children() > 0;) {
    below = nodes_[below].first_child;
    if (nodes_[nodes_[below].parent].children() > 1 || !cells_.cell(below, column).absent()) return;
  }
  standing(above, column).superseded = false;
  standing(above, column).worth = worth_of_state(above, column);
  refresh(above, column);
}

// A state saves more once the state above it is gone. Its worth is then too low, so it is enough to count the first of
// the order again until it stays the first. A new state above it makes it save less; that counts from its next use on.
void Eviction::reassess(std::size_t column) {
  const Order& order = orders_[column];
  while (!order.empty() && !nodes_[order.top()].removed) {
    const Index node = order.top();
    const double worth = worth_of_state(node, column);
    if (worth <= standing(node, column).worth) return;
    standing(node, column).worth = worth;
    put(node, column);
  }
}

// ---------------------------------------------------------------- what goes next

void Eviction::expect(Index node, Account account, double now, double due) {
  if (!cells_.component(0).leaf_only()) return;
  has_one_order_ = false;
  Lookahead(*this).expect(node, account, now, due);
}

Index Eviction::victim(std::size_t column, OwnerId owner, std::uint64_t want) {
  if (has_one_order_) [[likely]]
    return choose(column);
  const auto by_policy = [&] { return expected_ && column == kAdvised ? Lookahead(*this).choose() : choose(column); };
  if (!shares_) return by_policy();
  if (!ranks_itself() && unranked(column) != kNone) return kNone;
  if (cells_.component(column).weighs) reassess(column);
  return shares_->victim(column, owner, want, by_policy);
}

std::uint64_t Eviction::at_once(Index node, std::size_t column, std::uint64_t want, OwnerId owner) const {
  if (has_one_order_) return want;
  if (expected_ && column == kAdvised) want = std::min(want, expected_->at_once(node));
  if (replacement(column)) want = std::min(want, replacement(column)->at_once(node));
  return shares_ ? shares_->at_once(node, column, want, owner) : want;
}

Index Eviction::choose(std::size_t column) {
  if (cells_.component(column).weighs) reassess(column);
  if (!remembers_) {
    const Order& order = orders_[column];
    return order.empty() || (!ranks_itself() && order.rank(order.top()).major == kUnranked) ? kNone : order.top();
  }
  const Queues candidates = queues(column);
  if (candidates.empty()) return kNone;
  Replacement* const at = replacement(column);
  if (!at || (!candidates.empty(0) && goes_first(candidates.top(), column)))
    return !ranks_itself() && unranked(column) != kNone ? kNone : candidates.top();
  return at->victim(candidates);
}

std::uint32_t Eviction::pages_together(Index node, std::size_t column) const {
  const Node& n = nodes_[node];
  const std::uint32_t first = cells_.first_needed(node, column);
  return standing(node, column).worth && n.start < first ? first - n.start : n.pages;
}

void Eviction::evicted(Index node, std::size_t column) noexcept {
  if (cells_.component(column).weighs && !nodes_[node].removed && !is_demoted(node, column))
    inflation_[column] += kAging * std::max(standing(node, column).worth - inflation_[column], 0.0);
}

void Eviction::done(std::size_t column) noexcept {
  if (replacement(column)) replacement(column)->learn_capacity(cells_.counts(column).present);
}

// Removed nodes are the first of their order.
Index Eviction::first_removed(std::size_t column) const {
  const Queues candidates = queues(column);
  return !candidates.empty(0) && nodes_[candidates.top()].removed ? candidates.top() : kNone;
}

Index Eviction::unranked(std::size_t column) const {
  const Order& order = orders_[column];
  return order.empty() || order.rank(order.top()).major != kUnranked ? kNone : order.top();
}

void Eviction::rank(Index node, std::size_t column, Rank rank) {
  Order& order = orders_[column];
  if (node == kNone || !order.contains(node))
    throw BadValue{"node", std::to_string(nodes_.handle(node)), "a candidate for eviction"};
  if (!(rank.major > kUnranked)) throw BadValue{"rank", std::to_string(rank.major), "a number above -infinity"};
  order.put(node, {rank}, nodes_[node].start);
  if (shares_) shares_->put(node, column, rank, nodes_[node].start);
}

// ---------------------------------------------------------------- check

void Eviction::check() const {
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    std::size_t candidates = 0;
    std::array<std::uint64_t, kQueues> pages{};
    for (Index node = 1; node < nodes_.nodes().size(); ++node) {
      const Cell& c = cells_.cell(node, column);
      if (!nodes_[node].live && queues(column).contains(node)) broken(node, "a free node cannot be evicted");
      candidates += queues(column).contains(node);
      if (c.present() && replacement(column)) pages[replacement(column)->queue(node)] += c.ids.size();
    }
    for (std::uint32_t queue = 0; replacement(column) && queue < kQueues; ++queue)
      if (pages[queue] != replacement(column)->size(queue)) broken(kNone, "the pages of each queue are counted");
    if (shares_ && !shares_->sound(column)) broken(kNone, "the orders of owners are heaps");
    if (expected_ && !expected_->sound()) broken(kNone, "the order of what is expected is a heap");
    if (!queues(column).sound() || queues(column).size() != candidates) broken(kNone, "the order is a heap");
  }
}

void Eviction::check_node(Index node) const {
  const Node& n = nodes_[node];
  for (std::size_t column = 0; column < cells_.columns; ++column) {
    const Queues order = queues(column);
    const bool said = column == kAdvised && expected_ && expected_->holds(node) && !goes_first(node, column);
    const bool withdrawn = column == kAdvised && expected_ && expected_->withdrawn(node);
    if (column == kAdvised && expected_ && expected_->offered(node) != (said && cells_.candidate(node, column)))
      broken(node, "exactly what is expected and can be evicted is in that order");
    if (withdrawn && !said) broken(node, "only what is expected is withdrawn");
    // A node that advice spares is out of the policy's sight. Its owner may still have too much.
    const bool evictable = cells_.candidate(node, column), candidate = evictable && !withdrawn;
    if (order.contains(node) != candidate) broken(node, "exactly the cells that can be evicted are in the order");
    if (replacement(column) && replacement(column)->offers(node, candidate) != candidate)
      broken(node, "the policy knows the candidates");
    const bool known = evictable && (policy_.rank || cells_.component(column).weighs || goes_first(node, column));
    const Rank rank = known ? rank_of(node, column, n.accessed) : Rank{};
    if (shares_ && !shares_->sound(node, column, evictable, known ? &rank : nullptr, n.start))
      broken(node, "the orders of owners have exactly the cells that can be evicted, and those beyond a share");
    if (!candidate) continue;
    if (!order.holds(node, known ? place_of(node, column, n.accessed) : Place{order.rank(node)}, n.start))
      broken(node, "the order has the node's rank");
  }
  if (listens() && names_[node] != name_of(n)) broken(node, "a node has the name of its last page");
}

}  // namespace mainstem
