#include "eviction/eviction.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

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
  return Identity::mix(reinterpret_cast<const std::uint8_t*>(ns.data()), ns.size());
}

}  // namespace

Eviction::Eviction(Structure& nodes, const Residency& cells, std::string_view policy, double symbol_tokens,
                   std::uint32_t protected_hits)
    : nodes_(nodes),
      cells_(cells),
      policy_(find_policy(policy)),
      protected_hits_(protected_hits),
      remembers_(policy_.make && cells.rows[0].per_page()),
      has_standings_(!std::all_of(cells.rows.begin(), cells.rows.end(), std::mem_fn(&Component::leaf_only))) {
  replacements_.resize(cells.slots);
  const auto is_state = [](const Component& row) { return !row.per_page(); };
  const bool has_states = std::any_of(cells.rows.begin(), cells.rows.end(), is_state);
  const Surroundings around{nodes.nodes(), names_, tick_, nodes.page_bytes, symbol_tokens * nodes.page_size,
                            has_states};
  for (std::uint32_t tier = 0; remembers_ && tier < cells.tiers; ++tier)
    replacements_[cells.slot(0, tier)] = policy_.make(around);
  if (remembers_) queue_count_ = replacements_[0]->queues();
  orders_.resize(queue_count_ * cells.slots);
  inflation_.resize(cells.slots);
}

std::size_t Eviction::bytes() const {
  std::size_t total = standings_.bytes() + names_.bytes();
  for (const Order& order : orders_)
    total += order.bytes();
  for (const auto& replacement : replacements_)
    if (replacement) total += replacement->bytes();
  return total;
}

// ---------------------------------------------------------------- orders

inline Rank Eviction::rank_of(Index node, std::size_t slot, std::uint64_t accessed) const {
  const Node& n = nodes_[node];
  if (n.removed || !cells_.row(slot).leaf_only()) [[unlikely]]
    return rank_by_standing(node, slot, accessed);
  return policy_.rank ? policy_.rank(n, accessed, protected_hits_) : Rank{kUnranked, 0};
}

[[gnu::noinline]] Rank Eviction::rank_by_standing(Index node, std::size_t slot, std::uint64_t accessed) const {
  const std::uint64_t used = cells_.row(slot).leaf_only() ? accessed : standing(node, slot).used;
  if (goes_first(node, slot)) return {std::numeric_limits<double>::lowest(), number(used)};
  if (cells_.row(slot).weighs) return {standing(node, slot).worth, number(used)};
  return policy_.rank ? policy_.rank(nodes_[node], used, protected_hits_) : Rank{kUnranked, 0};
}

Place Eviction::place_of(Index node, std::size_t slot, std::uint64_t accessed) const {
  const Replacement* const at = replacement(slot);
  return at && !goes_first(node, slot) ? at->place(node, accessed) : Place{rank_of(node, slot, accessed)};
}

std::uint64_t Eviction::used(Index node, std::size_t slot) const {
  return cells_.row(slot).leaf_only() ? nodes_[node].accessed : standing(node, slot).used;
}

// Whether a cell is evicted before all others of its kind, whatever the policy: removed nodes, superseded states, and
// window pages before the windows of all prefixes that have ended so far. A window that ends with a node may begin
// inside it: then the pages before the window are evicted first, and cut_before() says how many there are.
bool Eviction::goes_first(Index node, std::size_t slot) const {
  const Component& row = cells_.row(slot);
  if (nodes_[node].removed) return true;
  if (row.leaf_only()) return false;
  if (standing(node, slot).worth == 0) return true;
  return row.per_page() && nodes_[node].start < cells_.first_needed(node, slot);
}

// Policies that remember have functions of their own, so that the others do not pay for them.
inline void Eviction::put(Index node, std::size_t slot) {
  if (remembers_) [[unlikely]]
    put_in_queue(node, slot);
  else
    orders_[slot].put(node, rank_of(node, slot, nodes_[node].accessed), nodes_[node].start);
}

inline void Eviction::drop(Index node, std::size_t slot) {
  if (remembers_) [[unlikely]]
    drop_from_queue(node, slot);
  else if (orders_[slot].contains(node))
    orders_[slot].remove(node);
}

[[gnu::noinline]] void Eviction::put_in_queue(Index node, std::size_t slot) {
  const Node& n = nodes_[node];
  const Place place = place_of(node, slot, n.accessed);
  const std::uint32_t before = queues(slot).queue(node);
  if (before < queue_count_ && before != place.queue) order(slot, before).remove(node);
  order(slot, place.queue).put(node, place.rank, n.start);
  if (replacement(slot)) replacement(slot)->offered(node);
}

[[gnu::noinline]] void Eviction::drop_from_queue(Index node, std::size_t slot) {
  const std::uint32_t queue = queues(slot).queue(node);
  if (queue == queue_count_) return;
  order(slot, queue).remove(node);
  if (replacement(slot)) replacement(slot)->withdrawn(node);
}

// Drops an external rank; the policy is asked for a new one.
void Eviction::refresh(Index node, std::size_t slot) noexcept {
  if (cells_.candidate(node, slot))
    put(node, slot);
  else
    drop(node, slot);
}

void Eviction::touch(Index node, std::uint64_t tick) {
  nodes_[node].accessed = tick;
  for (std::size_t s = 0; s < cells_.slots; ++s)
    if (cells_.candidate(node, s)) put(node, s);
}

// ---------------------------------------------------------------- nodes come, go, are cut and joined

void Eviction::reserve(std::size_t nodes) {
  if (has_standings_) standings_.resize(nodes * cells_.slots);
  for (Order& order : orders_)
    order.reserve(nodes);
  if (remembers_) names_.resize(nodes);
  for (const auto& replacement : replacements_)
    if (replacement) replacement->reserve(nodes);
}

void Eviction::made(Index node, std::int32_t priority) noexcept {
  Node& n = nodes_[node];
  if (!n.root()) {
    n.priority = priority;
    n.created = n.accessed = tick_;
  }
  if (remembers_) names_[node] = name_of(n);
}

std::uint64_t Eviction::name_of(const Node& n) const {
  return n.root() ? root_name(text(n.key)) : Identity::of(names_[n.parent], n.key.data(), n.pages, nodes_.page_bytes);
}

void Eviction::renew(Index node, std::int32_t priority) noexcept {
  Node& n = nodes_[node];
  n.created = n.accessed = tick_;
  n.hits = 0;
  n.priority = priority;
  n.forked = false;
}

// The upper half is new. A window's cell in it is worth something only if the window that ends at the lower half
// reaches that far.
void Eviction::cut(Index upper, Index lower) noexcept {
  const Node& n = nodes_[lower];
  if (remembers_) names_[upper] = Identity::above(names_[lower], n.key.data(), n.pages, nodes_.page_bytes);
  for (std::size_t s = 0; s < cells_.slots; ++s) {
    if (cells_.row(s).per_page()) {
      if (has_standings_) {
        standing(upper, s) = standing(lower, s);
        if (cells_.first_needed(lower, s) >= nodes_[upper].end()) standing(upper, s).worth = 0;
      }
      if (cells_.cell(lower, s).present() && replacement(s)) replacement(s)->split(upper, lower);
    }
    refresh(upper, s);
    refresh(lower, s);
  }
}

// Two nodes may be joined if the order cannot tell: they have the same rank, and no window that counts lies in them.
bool Eviction::may_join(Index upper, Index lower) const {
  const Node& u = nodes_[upper];
  const Node& l = nodes_[lower];
  if (!ranks_itself() || u.hits != l.hits || u.priority != l.priority) return false;
  for (std::size_t s = 0; s < cells_.slots; ++s) {
    if (!cells_.cell(upper, s).present()) continue;
    if (cells_.row(s).begins_late() && (standing(upper, s).worth || standing(lower, s).worth)) return false;
    if (replacement(s) && !replacement(s)->alike(upper, lower)) return false;
  }
  // Using a child uses its parent, see gone().
  const std::uint64_t accessed = std::max<std::uint64_t>(u.accessed, l.accessed);
  if (!remembers_) return !cells_.row(0).leaf_only() || rank_of(upper, 0, accessed) == rank_of(lower, 0, l.accessed);
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
    const std::size_t s = cells_.slot(0, tier);
    if (cells_.cell(upper, s).present() && place_of(upper, s, accessed) != place_of(lower, s, l.accessed)) return false;
  }
  return true;
}

void Eviction::join(Index upper, Index lower) noexcept {
  nodes_[lower].accessed = std::max<std::uint64_t>(nodes_[upper].accessed, nodes_[lower].accessed);
  for (std::size_t s = 0; s < cells_.slots; ++s) {
    drop(upper, s);
    if (cells_.row(s).per_page()) {
      if (cells_.cell(upper, s).present() && replacement(s)) replacement(s)->joined(upper, lower);
      if (has_standings_) standing(lower, s).used = std::max<std::uint64_t>(used(upper, s), used(lower, s));
    }
    refresh(lower, s);
  }
}

void Eviction::refresh(Index node) noexcept {
  for (std::size_t s = 0; s < cells_.slots; ++s)
    refresh(node, s);
}

void Eviction::inherit(Index node, std::uint64_t accessed) noexcept {
  if (nodes_[node].accessed < accessed) touch(node, accessed);
}

// ---------------------------------------------------------------- ids come and go

void Eviction::came(Index node, std::size_t slot) noexcept {
  if (remembers_ && cells_.cell(node, slot).present()) [[unlikely]]
    if (replacement(slot)) replacement(slot)->came(node);
  if (!cells_.row(slot).leaf_only()) [[unlikely]]
    note_standing(node, slot);
  refresh(node, slot);
  refresh(nodes_[node].parent, slot);
}

void Eviction::settled(Index node, std::size_t slot) noexcept {
  if (replacement(slot)) replacement(slot)->came(node);
  refresh(node, slot);
}

void Eviction::gone(Index node, std::size_t slot, bool was_present) noexcept {
  Node& n = nodes_[node];
  if (was_present && replacement(slot)) replacement(slot)->gone(node, n.pages);
  if (!cells_.row(slot).per_page()) n.forked = n.forked && !cells_.empty_of(node, cells_.component_of(slot));
  const Index parent = n.parent;
  refresh(node, slot);
  refresh(parent, slot);
  // Using a child uses its parent. An insertion after a node does not mark all nodes above: that would cost O(depth),
  // and it matters only now that the parent may be evicted next.
  if (cells_.row(slot).leaf_only()) inherit(parent, n.accessed);
}

void Eviction::trim(Index node, std::uint32_t tier, std::uint32_t pages) noexcept {
  if (!remembers_) return;
  const std::size_t s = cells_.slot(0, tier);
  if (cells_.cell(node, s).present()) replacements_[s]->gone(node, pages);
  const Node& n = nodes_[node];
  const std::size_t kept = std::size_t{n.pages - pages} * nodes_.page_bytes;
  names_[node] = Identity::above(names_[node], n.key.data() + kept, pages, nodes_.page_bytes);
}

// ---------------------------------------------------------------- use

void Eviction::asked(std::string_view ns, const Walk& path, Bytes key) noexcept {
  const Index deepest = path.empty() ? kNone : path.back().node;
  key = key.first(key.size() / nodes_.page_bytes * nodes_.page_bytes);
  const std::uint64_t root = root_name(ns);
  for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier)
    replacement(cells_.slot(0, tier))->asked(root, deepest, key);
  for (const Step& step : path)
    for (std::uint32_t tier = 0; tier < cells_.tiers; ++tier) {
      const std::size_t s = cells_.slot(0, tier);
      if (cells_.cell(step.node, s).present()) replacement(s)->used(step.node);
    }
}

void Eviction::found(const Walk& path) noexcept {
  for (const Step& step : path) {
    Node& n = nodes_[step.node];
    ++n.hits;
    n.accessed = tick_;
    if (!cells_.single_cell || &step == &path.back()) touch(step.node, tick_);  // otherwise inner nodes have no rank
  }
}

void Eviction::visited(Index node, std::int32_t priority) noexcept {
  nodes_[node].priority = std::max(nodes_[node].priority, priority);
  touch(node, tick_);
}

// This does not count as a hit, and policies that remember are not notified.
void Eviction::in_use(Index node, std::uint32_t tier) noexcept {
  ++tick_;
  if (cells_.single_cell && !remembers_)
    nodes_[node].accessed = tick_;  // it is locked, and so in no order
  else if (!remembers_)
    touch(node, tick_);
  for (std::uint32_t c = 0; has_standings_ && c < cells_.components(); ++c) {
    const std::size_t s = cells_.slot(c, tier);
    if (cells_.row(s).leaf_only()) continue;
    end_window(node, s, 0);
    if (cells_.row(s).per_page() || cells_.cell(node, s).absent()) continue;
    standing(node, s).used = tick_;
    refresh(node, s);
  }
}

// A prefix ends at a node: it uses the window and the state there, and no earlier ones.
void Eviction::ended(Index node, std::size_t slot, double worth) noexcept {
  if (node == kNone || cells_.row(slot).leaf_only()) return;
  end_window(node, slot, worth);
  if (cells_.row(slot).per_page() || cells_.cell(node, slot).absent()) return;
  credit(node, slot);
  refresh(node, slot);
}

void Eviction::end_window(Index node, std::size_t slot, double least) noexcept {
  if (!cells_.row(slot).begins_late()) return;
  const std::uint32_t first = cells_.first_needed(node, slot);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    Standing& at = standing(node, slot);
    at.worth = std::max(at.worth, least);
    at.used = tick_;
    refresh(node, slot);
  }
}

void Eviction::pass_window(Index node, std::size_t slot) noexcept {
  if (!cells_.row(slot).begins_late()) return;
  const std::uint32_t first = cells_.first_needed(node, slot);
  for (; !nodes_[node].root() && nodes_[node].end() > first; node = nodes_[node].parent) {
    if (standing(node, slot).worth != kInserted) continue;
    standing(node, slot).worth = 0;
    refresh(node, slot);
  }
}

// A window or a state was put here.
[[gnu::noinline]] void Eviction::note_standing(Index node, std::size_t slot) {
  standing(node, slot).worth = 0;
  credit(node, slot);
  if (!cells_.row(slot).per_page()) supersede_above(node, slot);
}

std::uint32_t Eviction::saved_pages(Index node, std::size_t slot) const {
  Index above = nodes_[node].parent;
  while (!nodes_[above].root() && cells_.cell(above, slot).absent())
    above = nodes_[above].parent;
  return nodes_[node].end() - nodes_[above].end();
}

// A state was created or used. GreedyDual (Young 1994; Cao and Irani 1997): its worth is what it saves, plus the worth
// of the last evicted state, so that unused states age. All states have one size and their savings grow with the pages,
// so pages stand for floating-point operations saved per byte.
void Eviction::credit(Index node, std::size_t slot) {
  Standing& at = standing(node, slot);
  at.used = tick_;
  if (!cells_.row(slot).per_page())
    at.worth = cells_.row(slot).weighs ? inflation_[slot] + saved_pages(node, slot) : kInserted;
}

// A sequence has grown past a state. Its next turn starts from the new state; the old one serves only sequences that
// part in between. It is evicted first, unless a sequence parts there or did.
void Eviction::supersede_above(Index node, std::size_t slot) {
  Index above = nodes_[node].parent;
  for (; !nodes_[above].root() && nodes_[above].children() == 1; above = nodes_[above].parent)
    if (!cells_.cell(above, slot).absent()) break;
  if (nodes_[above].root() || nodes_[above].children() > 1 || nodes_[above].forked) return;
  standing(above, slot).worth = 0;
  refresh(above, slot);
}

// ---------------------------------------------------------------- what goes next

Index Eviction::victim(std::size_t slot) {
  if (remembers_) return choose(slot);
  const Order& order = orders_[slot];
  return order.empty() || (!ranks_itself() && order.rank(order.top()).major == kUnranked) ? kNone : order.top();
}

// The victim after all nodes that get a second chance.
Index Eviction::choose(std::size_t slot) {
  const Queues candidates = queues(slot);
  if (candidates.empty()) return kNone;
  Replacement* const at = replacement(slot);
  if (!at || (!candidates.empty(0) && goes_first(candidates.top(), slot))) return candidates.top();
  for (;;) {
    const Index node = at->victim(candidates);
    if (!at->spares(node)) return node;
    refresh(node, slot);
  }
}

std::uint32_t Eviction::cut_before(Index node, std::size_t slot) const {
  const Node& n = nodes_[node];
  const std::uint32_t first = cells_.first_needed(node, slot);
  return standing(node, slot).worth && n.start < first ? first - n.start : n.pages;
}

void Eviction::evicted(Index node, std::size_t slot) noexcept {
  if (cells_.row(slot).weighs && !nodes_[node].removed)
    inflation_[slot] = std::max(inflation_[slot], standing(node, slot).worth);
}

void Eviction::done(std::size_t slot) noexcept {
  if (replacement(slot)) replacement(slot)->settle(cells_.counts(slot).present, queues(slot));
}

// Removed nodes are the first of their order.
Index Eviction::first_removed(std::size_t slot) const {
  const Queues candidates = queues(slot);
  return !candidates.empty(0) && nodes_[candidates.top()].removed ? candidates.top() : kNone;
}

Index Eviction::unranked(std::size_t slot) const {
  const Order& order = orders_[slot];
  return order.empty() || order.rank(order.top()).major != kUnranked ? kNone : order.top();
}

void Eviction::rank(Index node, std::size_t slot, Rank rank) {
  Order& order = orders_[slot];
  if (node == kNone || !order.contains(node))
    throw BadValue{"node", std::to_string(nodes_.handle(node)), "a candidate for eviction"};
  if (!(rank.major > kUnranked)) throw BadValue{"rank", std::to_string(rank.major), "a number above -infinity"};
  order.put(node, {rank}, nodes_[node].start);
}

// ---------------------------------------------------------------- check

void Eviction::check() const {
  for (std::size_t s = 0; s < cells_.slots; ++s) {
    std::size_t candidates = 0;
    std::array<std::uint64_t, kQueues> pages{};
    for (Index node = 1; node < nodes_.nodes().size(); ++node) {
      const Cell& c = cells_.cell(node, s);
      if (!nodes_[node].live && queues(s).contains(node)) broken(node, "a free node cannot be evicted");
      candidates += queues(s).contains(node);
      if (c.present() && replacement(s)) pages[replacement(s)->queue(node)] += c.ids.size();
    }
    for (std::uint32_t queue = 0; replacement(s) && queue < kQueues; ++queue)
      if (pages[queue] != replacement(s)->size(queue)) broken(kNone, "the pages of each queue are counted");
    if (!queues(s).sound() || queues(s).size() != candidates) broken(kNone, "the order is a heap");
  }
}

void Eviction::check_node(Index node) const {
  const Node& n = nodes_[node];
  for (std::size_t s = 0; s < cells_.slots; ++s) {
    const Queues order = queues(s);
    const bool candidate = cells_.candidate(node, s);
    if (order.contains(node) != candidate) broken(node, "exactly the cells that can be evicted are in the order");
    if (replacement(s) && replacement(s)->offers(node, candidate) != candidate)
      broken(node, "the policy knows the candidates");
    if (!candidate) continue;
    const bool known = policy_.rank || cells_.row(s).weighs || goes_first(node, s);
    if (!order.holds(node, known ? place_of(node, s, n.accessed) : Place{order.rank(node)}, n.start))
      broken(node, "the order has the node's rank");
  }
  if (remembers_ && names_[node] != name_of(n)) broken(node, "a node has the name of its last page");
}

}  // namespace mainstem
