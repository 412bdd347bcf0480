#include "replay/optimum.h"

#include <algorithm>
#include <utility>

#include "eviction/order.h"
#include "tree/tree.h"

namespace mainstem {

namespace {

// The cached blocks. Of two leaves the one whose next use is later is evicted first.
class Cached {
 public:
  explicit Cached(std::size_t nodes, const std::vector<Index>& parents)
      : parents_(parents), held_(nodes), children_(nodes), uses_(nodes) {
    leaves_.reserve(nodes);
  }

  bool has(Index node) const { return held_[node]; }
  std::size_t size() const { return size_; }

  // Caches a path whose blocks are used again at these times; only its last block can be a leaf.
  void use(std::span<const Index> path, std::span<const std::uint32_t> next_uses) {
    for (std::size_t i = 0; i < path.size(); ++i) {
      uses_[path[i]] = next_uses[i];
      if (!held_[path[i]]) hold(path[i]);
    }
    if (!path.empty() && children_[path.back()] == 0) rank(path.back());
  }
  void evict() {
    const Index node = leaves_.top();
    const Index parent = parents_[node];
    leaves_.remove(node);
    held_[node] = false;
    --size_;
    if (--children_[parent] == 0 && parent != kNone) rank(parent);
  }

 private:
  void hold(Index node) {
    held_[node] = true;
    ++size_;
    ++children_[parents_[node]];
    if (leaves_.contains(parents_[node])) leaves_.remove(parents_[node]);
  }
  void rank(Index node) { leaves_.put(node, {-number(uses_[node]), 0}, 0); }

  const std::vector<Index>& parents_;
  std::vector<bool> held_;
  std::vector<std::uint32_t> children_;
  std::vector<std::uint32_t> uses_;
  Order leaves_;
  std::size_t size_ = 0;
};

}  // namespace

void Optimum::add(std::span<const std::uint64_t> blocks) {
  require(ends_.size() < kNever - 1, "requests", ends_.size(), "fewer than 2**32 - 2");
  Index node = kNone;
  for (const std::uint64_t block : blocks)
    accesses_.push_back(node = child(node, block));
  ends_.push_back(accesses_.size());
}

Index Optimum::child(Index parent, std::uint64_t block) {
  const std::uint64_t mixed = fold(block ^ 0x9E3779B97F4A7C15ull, std::uint64_t{parent} << 32 | 0xA0761D65u);
  const auto hash = static_cast<std::uint32_t>(mixed >> 32 ^ mixed);
  const auto same = [&](Index node) { return parents_[node] == parent && blocks_[node] == block; };
  if (const Index known = table_.find(hash, same)) return known;
  const auto node = static_cast<Index>(parents_.size());
  parents_.push_back(parent);
  blocks_.push_back(block);
  table_.reserve(1);
  table_.insert(hash, node);
  return node;
}

std::span<const Index> Optimum::path(std::size_t request) const {
  const std::size_t begin = request ? ends_[request - 1] : 0;
  return {accesses_.data() + begin, ends_[request] - begin};
}

void Optimum::finish() {
  next_uses_.resize(accesses_.size());
  std::vector<std::uint32_t> next(parents_.size(), kNever);
  for (std::size_t request = ends_.size(); request-- > 0;) {
    const std::span<const Index> nodes = path(request);
    const auto begin = static_cast<std::size_t>(nodes.data() - accesses_.data());
    for (std::size_t i = 0; i < nodes.size(); ++i)
      next_uses_[begin + i] = std::exchange(next[nodes[i]], static_cast<std::uint32_t>(request));
  }
}

std::uint64_t Optimum::run(std::uint64_t capacity, std::int32_t* hits) const {
  require(next_uses_.size() == accesses_.size(), "block accesses", accesses_.size(), "finished");
  Cached cached(parents_.size(), parents_);
  std::uint64_t evicted = 0;
  for (std::size_t request = 0; request < ends_.size(); ++request) {
    const std::span<const Index> nodes = path(request);
    const auto end = std::find_if(nodes.begin(), nodes.end(), [&](Index node) { return !cached.has(node); });
    hits[request] = static_cast<std::int32_t>(end - nodes.begin());
    cached.use(nodes, {next_uses_.data() + (nodes.data() - accesses_.data()), nodes.size()});
    for (; cached.size() > capacity; ++evicted)
      cached.evict();
  }
  return evicted;
}

}  // namespace mainstem
