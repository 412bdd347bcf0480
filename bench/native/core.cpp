// Measures the core in C++, without Python: `core [--quick]` prints one line of JSON per measure; bench/core.py builds
// it, runs it and makes the table. Every input is made before the clock starts. Calls of less than a microsecond are
// timed many at once; for calls timed one by one, the cost of the clock is subtracted.
#include <malloc.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>

#include "cache.h"
#include "measure.h"

namespace mainstem {

namespace {

constexpr std::uint32_t kLong = 131072;  // tokens
const std::vector<Component> kFull{{Kind::full}};

struct Sizes {
  int rounds;               // of each measure taken in rounds
  std::uint32_t prompts;    // in the large tree
  std::uint32_t tokens;     // held, to measure bytes per token
  std::uint32_t evictions;  // timed one by one
};
constexpr Sizes kWhole{300, 520000, 8000000, 5000};
constexpr Sizes kQuick{60, 52000, 1000000, 1000};

double clock_cost = 0;

std::unique_ptr<Tree> make_tree(std::uint32_t page_size) {
  return std::make_unique<Tree>(4, page_size, kFull, 1, "lru", 12345);
}

// ---------------------------------------------------------------- a long prompt

// Reads and writes what a match must: compares the prompt with the keys of the tree, and copies the ids.
void touch_all(const std::vector<Piece>& pieces, const std::uint8_t* prompt, std::int32_t* out) {
  int parts = 0;
  for (const Piece& piece : pieces) {
    parts |= std::memcmp(prompt, piece.key, piece.bytes);
    std::memcpy(out, piece.ids, piece.pages * sizeof(*out));
    prompt += piece.bytes;
    out += piece.pages;
  }
  use(&parts);
}

void long_match(std::uint32_t page_size, std::uint32_t nodes, const Sizes& sizes) {
  Source source(7);
  const std::unique_ptr<Tree> tree = make_tree(page_size);
  Writer writer(*tree);
  const Tokens stored = source.tokens(kLong);
  writer.insert(bytes_of(stored));
  for (std::uint32_t i = 1; i < nodes; ++i) {  // a branch at each boundary, so that nothing can be joined there
    Tokens branch(stored.begin(), stored.begin() + kLong / nodes * i);
    branch.resize(branch.size() + page_size, 200000);
    writer.insert(bytes_of(branch));
  }
  const Tokens prompt = stored;
  Ids out(kLong / page_size);
  const auto match = [&] {
    const MatchResult found = tree->match("", bytes_of(prompt), false);
    tree->copy_ids(found.node, 0, 0, 0, out.data());
    use(out.data());
  };
  match();
  const std::vector<Piece> pieces = Probe::path(*tree, tree->match("", bytes_of(prompt), false).node);
  const auto floor = [&] {
    touch_all(pieces, bytes_of(prompt).data(), out.data());
    use(out.data());
  };
  std::vector<double> ratios, times, floors;
  for (int round = 0; round < sizes.rounds; ++round) {  // alternate which comes first
    const double early = round % 2 ? timed(match) : timed(floor);
    const double late = round % 2 ? timed(floor) : timed(match);
    times.push_back((round % 2 ? early : late) - clock_cost);
    floors.push_back((round % 2 ? late : early) - clock_cost);
    ratios.push_back(times.back() / floors.back());
  }
  const std::string name =
      "long match, page " + std::to_string(page_size) + ", " + std::to_string(pieces.size()) + " nodes";
  report(name, "µs", median(times));
  report(name + ", p99", "µs", quantile(times, 0.99));
  report(name + ", floor", "µs", median(floors));
  report(name + ", over its floor", "ratio", median(ratios));
}

// ---------------------------------------------------------------- a miss

void miss(std::uint32_t length, bool inside, const Sizes& sizes) {
  Source source(8);
  const std::unique_ptr<Tree> tree = make_tree(16);
  Writer writer(*tree);
  for (int i = 0; i < 10000; ++i)
    writer.insert(bytes_of(source.tokens(16)));
  std::vector<Tokens> prompts;
  for (int i = 0; i < 16; ++i)
    prompts.push_back(source.tokens(length));
  std::vector<double> times;
  for (int round = 0; round < sizes.rounds; ++round) {
    constexpr int kTimes = 8;
    times.push_back(timed([&] {
                      for (int i = 0; i < kTimes; ++i)
                        for (const Tokens& prompt : prompts) {
                          const MatchResult found = tree->match("", bytes_of(prompt), inside);
                          use(&found);
                        }
                    }) /
                    static_cast<double>(kTimes * prompts.size()));
  }
  const std::string name = "miss of " + std::to_string(length) + " tokens" + (inside ? ", looking inside pages" : "");
  report(name, "µs", median(times));
}

// ---------------------------------------------------------------- growing

constexpr std::uint32_t kPieces = 1000;
constexpr std::uint32_t kPrefix = 100000;  // tokens
constexpr std::uint32_t kMore = 16;        // tokens
constexpr int kSteps = 20;                 // timed at once

// 100,000 tokens in 1,000 pieces of 6 or 7 pages; if their ends are locked, they stay separate nodes.
Handle chain(Writer& writer, Tree& tree, const Tokens& tokens, bool locked) {
  Handle node = 0;
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < kPieces; ++i) {
    const std::size_t length = 16 * (i % 4 ? 6 : 7);
    node = writer.insert(bytes_of(tokens, at, at + length), node);
    if (locked) tree.lock(node, 0);
    at += length;
  }
  return node;
}

void grow_by_insert(bool locked, const Sizes& sizes) {
  Source source(9);
  const Tokens tokens = source.tokens(kPrefix + kMore * kSteps);
  std::vector<double> times;
  for (int round = 0; round < sizes.rounds / 10; ++round) {
    const std::unique_ptr<Tree> tree = make_tree(16);
    Writer writer(*tree);
    Handle node = chain(writer, *tree, tokens, locked);
    Ids ids(1, 1000000);
    times.push_back(timed([&] {
                      for (std::size_t at = kPrefix; at < tokens.size(); at += kMore, ++ids[0]) {
                        const IdSpan span(ids);
                        node = tree->insert("", node, {bytes_of(tokens, at, at + kMore), {&span, 1}}, 0, 0, true).node;
                      }
                    }) /
                    kSteps);
  }
  report(std::string("16 tokens more, Tree::insert, ") + (locked ? "1,000 nodes" : "joined"), "µs", median(times));
}

void grow_by_lease(bool locked, const Sizes& sizes) {
  Source source(9);
  const Tokens tokens = source.tokens(kPrefix + kMore * kSteps);
  std::vector<double> times;
  for (int round = 0; round < sizes.rounds / 10; ++round) {
    const std::unique_ptr<Tree> tree = make_tree(16);
    Pool pool(20000);
    Ids page_ids(kPrefix / 16);
    pool.allocate(page_ids.size(), page_ids.data());
    pool.move(page_ids, Owner::privately, Owner::cached);
    std::sort(page_ids.begin(), page_ids.end());
    Writer writer(*tree);  // uses the ids in the order in which the pool allocated them
    chain(writer, *tree, tokens, locked);
    Cache cache(*tree, pool, true);
    Lease lease(cache, "", 0, bytes_of(tokens, 0, kPrefix), kPrefix, false, {});
    times.push_back(timed([&] {
                      for (std::size_t at = kPrefix; at < tokens.size(); at += kMore) {
                        lease.append(bytes_of(tokens, at, at + kMore));
                        lease.reserve(kMore);
                        lease.publish(at + kMore);
                      }
                    }) /
                    kSteps);
  }
  report(std::string("16 tokens more, Lease, ") + (locked ? "1,000 nodes" : "joined"), "µs", median(times));
}

// Chunked prefill: a prompt of a little more than 128k tokens, reserved and published in chunks of 512.
void chunks(const Sizes& sizes) {
  constexpr std::uint32_t kChunk = 512;
  constexpr std::uint32_t kNear = 1024;
  Source source(10);
  std::vector<double> near, far, ratios;
  for (int round = 0; round < sizes.rounds / 10; ++round) {
    const std::unique_ptr<Tree> tree = make_tree(16);
    Pool pool(20000);
    Cache cache(*tree, pool, true);
    const Tokens tokens = source.tokens(kLong + 8 * kChunk);
    Lease lease(cache, "", 0, bytes_of(tokens), tokens.size(), false, {});
    std::vector<double> first, last;
    for (std::uint32_t at = 0; at < tokens.size(); at += kChunk) {
      const double time = timed([&] {
        lease.reserve(kChunk);
        lease.publish(at + kChunk);
      });
      if (at >= kNear && at < kNear + 8 * kChunk) first.push_back(time - clock_cost);
      if (at >= kLong) last.push_back(time - clock_cost);
    }
    near.push_back(median(first));
    far.push_back(median(last));
    ratios.push_back(far.back() / near.back());
  }
  report("chunk of 512 tokens behind 1k", "µs", median(near));
  report("chunk of 512 tokens behind 128k", "µs", median(far));
  report("chunk of 512 tokens, far over near", "ratio", median(ratios));
}

// ---------------------------------------------------------------- eviction

void evict(bool half_locked, const Sizes& sizes) {
  constexpr int kLeaves = 50000;
  Source source(11);
  const std::unique_ptr<Tree> tree = make_tree(16);
  Writer writer(*tree);
  const Handle system = writer.insert(bytes_of(source.tokens(32)));
  tree->lock(system, 0);
  for (int i = 0; i < kLeaves; ++i) {
    const Handle leaf = writer.insert(bytes_of(source.tokens(32)), system);
    if (half_locked && i % 2) tree->lock(leaf, 0);
  }
  std::vector<double> times;
  for (std::uint32_t i = 0; i < sizes.evictions; ++i)
    times.push_back(timed([&] { use(tree->evict(1, 0, 0).data()); }) - clock_cost);
  const std::string name = std::string("evict a page, leaves ") + (half_locked ? "half locked" : "all free");
  report(name + ", p50", "µs", median(times));
  report(name + ", p99", "µs", quantile(times, 0.99));
}

// ---------------------------------------------------------------- a large tree

// Prompts of 512 tokens that share the first 21 to 31 of 32 pages with an earlier one. Only the new tokens are kept; a
// prompt is assembled again before the clock starts, without reading the tree.
class Prompts {
 public:
  static constexpr std::uint32_t kTokens = 512, kPage = 16;

  explicit Prompts(Source& source) : source_(source) {}
  std::uint32_t add() {
    const auto n = static_cast<std::uint32_t>(all_.size());
    const bool alone = n < 64;
    all_.push_back({alone ? 0 : source_.below(n), alone ? 0 : (21 + source_.below(11)) * kPage, fresh_.size()});
    const Tokens more = source_.tokens(kTokens - all_.back().shared);
    fresh_.insert(fresh_.end(), more.begin(), more.end());
    return n;
  }
  void write(std::uint32_t at, std::uint32_t* out, std::uint32_t length = kTokens) const {
    const Prompt& prompt = all_[at];
    const std::uint32_t shared = std::min(prompt.shared, length);
    if (shared) write(prompt.parent, out, shared);
    std::copy_n(&fresh_[prompt.fresh], length - shared, out + shared);
  }

 private:
  struct Prompt {
    std::uint32_t parent, shared;
    std::size_t fresh;
  };
  Source& source_;
  std::vector<Prompt> all_;
  Tokens fresh_;
};

void cold(const Sizes& sizes) {
  Source source(12);
  Prompts prompts(source);
  const std::unique_ptr<Tree> tree = make_tree(16);
  Writer writer(*tree);
  Tokens prompt(Prompts::kTokens);
  for (std::uint32_t i = 0; i < sizes.prompts; ++i) {
    prompts.write(prompts.add(), prompt.data());
    writer.insert(bytes_of(prompt));
  }
  std::vector<std::uint32_t> order(sizes.prompts);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(13));
  Ids out(Prompts::kTokens / 16);
  std::vector<double> peeks, matches;
  for (std::uint32_t i = 0; i < sizes.prompts / 4; ++i) {
    prompts.write(order[i], prompt.data());
    if (i % 2)
      peeks.push_back(timed([&] {
                        use(&prompt);
                        tree->peek("", bytes_of(prompt), false);
                      }) -
                      clock_cost);
    else
      matches.push_back(timed([&] {
                          const MatchResult found = tree->match("", bytes_of(prompt), false);
                          tree->copy_ids(found.node, 0, 0, 0, out.data());
                          use(out.data());
                        }) -
                        clock_cost);
  }
  double depth = 0;
  constexpr std::uint32_t kSample = 1000;
  for (std::uint32_t i = 0; i < kSample; ++i) {
    prompts.write(order[i], prompt.data());
    depth += static_cast<double>(Probe::path(*tree, tree->match("", bytes_of(prompt), false).node).size());
  }
  report("cold match of 512 tokens, p50", "µs", median(matches));
  report("cold match of 512 tokens, p99", "µs", quantile(matches, 0.99));
  report("cold peek of 512 tokens, p50", "µs", median(peeks));
  report("the large tree, tokens", "millions", static_cast<double>(tree->counts(0, 0).present) * 16 / 1e6);
  report("the large tree, nodes", "thousands", static_cast<double>(tree->size()) / 1e3);
  report("the large tree, nodes on a path", "nodes", depth / kSample);
}

// ---------------------------------------------------------------- memory

// The memory of the process, less free memory held by malloc: long arrays do not come from malloc.
double allocated() {
  std::size_t pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (file && std::fscanf(file, "%zu", &pages) != 1) pages = 0;
  if (file) std::fclose(file);
  return static_cast<double>(pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) - mallinfo2().fordblks);
}

void memory(std::uint32_t node, const Sizes& sizes) {
  Source source(14);
  const double before = allocated();
  const std::unique_ptr<Tree> tree = make_tree(16);
  {
    Writer writer(*tree);
    for (std::uint32_t held = 0; held < sizes.tokens; held += node)
      writer.insert(bytes_of(source.tokens(node)));
  }
  const double tokens = static_cast<double>(tree->counts(0, 0).present) * 16;
  const std::string name = "memory, nodes of " + std::to_string(node) + " tokens";
  report(name, "bytes a token", static_cast<double>(tree->bytes()) / tokens);
  report(name + ", as malloc counts", "bytes a token", (allocated() - before) / tokens);
}

// Splits a prompt of 128k tokens after its first page, and evicts everything but that page and the branch. Measures
// many such trees at once, as malloc's count is inexact by a few hundred bytes.
std::pair<double, double> held_after_split(const Tokens& prompt, bool with_prompt) {
  constexpr std::size_t kTrees = 64;
  Tokens branch(prompt.begin(), prompt.begin() + 16);
  branch.resize(32, 200000);
  std::vector<std::unique_ptr<Tree>> trees(kTrees);
  const double before = allocated();
  double held = 0;
  for (std::unique_ptr<Tree>& tree : trees) {
    tree = make_tree(16);
    Writer writer(*tree);
    if (with_prompt) writer.insert(bytes_of(prompt));
    tree->lock(writer.insert(bytes_of(branch)), 0);
    tree->evict(kLong, 0, 0);
    held += static_cast<double>(tree->bytes()) / kTrees;
  }
  return {held, (allocated() - before) / kTrees};
}

void worst_split() {
  Source source(15);
  const Tokens prompt = source.tokens(kLong);
  const auto [small, small_malloc] = held_after_split(prompt, false);
  const auto [held, held_malloc] = held_after_split(prompt, true);
  report("two pages and nothing else", "bytes", small);
  report("two pages left of 128k after a split", "bytes", held);
  report("two pages and nothing else, as malloc counts", "bytes", small_malloc);
  report("two pages left of 128k after a split, as malloc counts", "bytes", held_malloc);
  report("two pages left of 128k, over the same alone", "ratio", held_malloc / small_malloc);
  std::vector<double> times;
  for (int round = 0; round < 30; ++round) {
    const std::unique_ptr<Tree> tree = make_tree(16);
    Writer(*tree).insert(bytes_of(prompt));
    times.push_back(timed([&] { tree->match("", bytes_of(prompt, 0, 16), false); }) - clock_cost);
  }
  report("split of 128k behind the first page", "µs", median(times));
}

void run(const Sizes& sizes) {
  clock_cost = clock_us();
  report("reading the clock twice", "µs", clock_cost);
  for (const std::uint32_t page_size : {16u, 1u})
    for (const std::uint32_t nodes : {1u, 64u, 1024u})
      long_match(page_size, nodes, sizes);
  for (const bool inside : {false, true})
    for (const std::uint32_t length : {512u, kLong})
      miss(length, inside, sizes);
  for (const bool locked : {true, false}) {
    grow_by_insert(locked, sizes);
    grow_by_lease(locked, sizes);
  }
  chunks(sizes);
  for (const bool half_locked : {false, true})
    evict(half_locked, sizes);
  for (const std::uint32_t node : {4096u, 256u, 64u})
    memory(node, sizes);
  worst_split();
  cold(sizes);
}

}  // namespace

}  // namespace mainstem

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  mainstem::run(quick ? mainstem::kQuick : mainstem::kWhole);
  return 0;
}
