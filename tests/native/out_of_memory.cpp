// Fails every allocation of every operation of the tree, one after another: the tree must be sound afterwards and hold
// the same pages under the same prefixes. Built and run by tests/test_out_of_memory.py; prints a line an operation.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <numeric>

#include "tree.h"

namespace {

long allocations_left = -1;  // below 0: none fails

bool fails_now() {
  return allocations_left >= 0 && allocations_left-- == 0;
}

}  // namespace

// The linker sends the core's calls of malloc here (--wrap=malloc).
extern "C" void* __real_malloc(std::size_t bytes);
extern "C" void* __wrap_malloc(std::size_t bytes) {
  return fails_now() ? nullptr : __real_malloc(bytes);
}

void* operator new(std::size_t bytes) {
  void* memory = fails_now() ? nullptr : __real_malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace {

using namespace mainstem;
using Tokens = std::vector<std::uint32_t>;

Tokens run_of(std::uint32_t length, std::uint32_t first = 0) {
  Tokens tokens(length);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Bytes bytes_of(const Tokens& tokens) {
  return {reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size() * sizeof(tokens[0])};
}

Handle insert(Tree& tree, const char* ns, const Tokens& tokens, std::int32_t first_id, Handle after = 0,
              bool ready = true) {
  Ids ids(tokens.size());
  std::iota(ids.begin(), ids.end(), first_id);
  const IdSpan column(ids);
  return tree.insert(ns, bytes_of(tokens), {&column, 1}, after, 0, 0, ready, true).node;
}

// What the tree holds, however it is cut into nodes: the ids of each leaf's path, and the counts.
std::string contents(const Tree& tree) {
  std::string text;
  for (const std::string& ns : tree.namespaces()) {
    for (const NodeView& node : tree.nodes(ns)) {
      if (node.children) continue;
      Ids path(tree.end(node.stats.node));
      tree.copy_ids(node.stats.node, 0, 0, path.data());
      text += ns + ":";
      for (const std::int32_t id : path)
        text += std::to_string(id) + ",";
    }
  }
  const CellCounts counts = tree.counts(0, 0);
  return text + std::to_string(counts.present) + "/" + std::to_string(counts.locked);
}

struct Operation {
  const char* name;
  std::function<void(Tree&, Handle)> run;
};

const Operation kOperations[] = {
    {"insert into a new namespace",
     [](Tree& t, Handle) { insert(t, "a tenant with a long name", run_of(100, 5000), 5000); }},
    {"insert a branch",
     [](Tree& t, Handle) {
       Tokens tokens = run_of(300);
       tokens[150] = 99999;
       insert(t, "a", tokens, 6000);
     }},
    {"extend", [](Tree& t, Handle node) { insert(t, "a", run_of(400), 7000, node); }},
    {"extend in flight", [](Tree& t, Handle node) { insert(t, "a", run_of(400), 7000, node, false); }},
    {"match with a split", [](Tree& t, Handle) { t.match("a", bytes_of(run_of(120)), true); }},
    {"lock", [](Tree& t, Handle node) { t.lock(node, 0); }},
    {"evict everything", [](Tree& t, Handle) { t.evict(1000, 0, 0); }},
    {"evict a part", [](Tree& t, Handle) { t.evict(10, 0, 0); }},
};

// Runs one operation with its k-th allocation failing; whether it had so many.
bool run_failing(const Operation& operation, long k) {
  Tree tree(4, 1, {{Kind::full}}, 1, "lru", 42);
  const Handle node = insert(tree, "a", run_of(300), 0);
  insert(tree, "b", run_of(20, 1000), 1000);
  const std::string before = contents(tree);
  allocations_left = k;
  try {
    operation.run(tree, node);
    allocations_left = -1;
    return false;
  } catch (const std::bad_alloc&) {
    allocations_left = -1;
  }
  tree.check();
  if (contents(tree) != before) throw Corrupt{"the contents changed"};
  return true;
}

}  // namespace

int main() {
  for (const Operation& operation : kOperations) {
    long failed = 0;
    try {
      while (run_failing(operation, failed))
        ++failed;
    } catch (const Corrupt& error) {
      std::printf("%s: allocation %ld: %s\n", operation.name, failed, error.message.c_str());
      return 1;
    }
    std::printf("%s: %ld allocations failed\n", operation.name, failed);
  }
  return 0;
}
