// A fixed run of the core for bench/native/instructions.py, which counts its instructions: `instructions RUN`, where
// RUN is "long", or the page size of the chats. After a + follows how many capacities of evicted pages are remembered
// for explanations; a ? at the end: each prompt is explained before it is served. Prints the number of requests
// counted. Only the code inside counted() is counted; prompts are made before.
#include <cstdlib>
#include <cstring>
#include <functional>

#include "lease/lease.h"
#include "measure.h"

// The function that the counter waits for.
extern "C" [[gnu::noinline]] void counted(const std::function<void()>* run) {
  (*run)();
}

namespace mainstem {

namespace {

constexpr std::uint32_t kCapacity = 40000;  // tokens; small enough to evict
const std::vector<Component> kFull{{Kind::full}};

// Chats that share system prompts, interleaved: a small version of bench/workload.py.
std::vector<Tokens> chats() {
  constexpr std::size_t kChats = 100, kOpen = 16, kTurns = 6, kSystems = 4, kSystemTokens = 2048, kAnswer = 128;
  struct Chat {
    Tokens tokens;
    std::size_t turns;
  };
  Source source(1);
  std::vector<Tokens> systems, prompts;
  for (std::size_t i = 0; i < kSystems; ++i)
    systems.push_back(source.tokens(kSystemTokens));
  std::vector<Chat> open;
  const auto say = [&](Chat& chat, std::size_t n) {
    const Tokens more = source.tokens(n);
    chat.tokens.insert(chat.tokens.end(), more.begin(), more.end());
  };
  for (std::size_t started = 0; started < kChats || !open.empty();) {
    for (; started < kChats && open.size() < kOpen; ++started)
      open.push_back({systems[source.below(kSystems)], kTurns});
    const auto at = static_cast<std::ptrdiff_t>(source.below(static_cast<std::uint32_t>(open.size())));
    Chat& chat = open[static_cast<std::size_t>(at)];
    say(chat, 64 + source.below(449));
    prompts.push_back(chat.tokens);
    say(chat, kAnswer);
    if (--chat.turns == 0) open.erase(open.begin() + at);
  }
  return prompts;
}

std::size_t run_chats(std::uint32_t page_size, std::uint32_t remembered, bool explains) {
  const std::vector<Tokens> prompts = chats();
  Tree tree(4, page_size, kFull, 1, "lru", 12345);
  if (remembered) tree.remember(std::size_t{remembered} * kCapacity / page_size);
  Pool pool(kCapacity / page_size);
  Cache cache(tree, pool, true);
  const std::function<void()> run = [&] {
    for (const Tokens& prompt : prompts) {
      if (explains) use(tree.explain("", bytes_of(prompt), false).runs.data());
      Lease lease(cache, "", 0, bytes_of(prompt), prompt.size() - 1, false, {});
      lease.reserve(prompt.size() - lease.hit());
      lease.finish(prompt.size());
    }
  };
  counted(&run);
  return prompts.size();
}

// A prompt of 128k tokens in 1,024 nodes, looked up repeatedly.
std::size_t run_long() {
  constexpr std::size_t kLong = 131072, kNodes = 1024, kTimes = 50;
  Source source(2);
  Tree tree(4, 16, kFull, 1, "lru", 12345);
  Writer writer(tree);
  const Tokens prompt = source.tokens(kLong);
  writer.insert(bytes_of(prompt));
  for (std::size_t i = 1; i < kNodes; ++i) {
    Tokens branch(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(kLong / kNodes * i));
    branch.resize(branch.size() + 16, 200000);
    writer.insert(bytes_of(branch));
  }
  Ids ids(kLong / 16);
  const std::function<void()> run = [&] {
    for (std::size_t i = 0; i < kTimes; ++i)
      tree.copy_ids(tree.match("", bytes_of(prompt), false).node, 0, 0, 0, ids.data());
  };
  counted(&run);
  return kTimes;
}

}  // namespace

}  // namespace mainstem

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s PAGE_SIZE[+CAPACITIES[?]] | long\n", argv[0]);
    return 2;
  }
  const bool is_long = std::strcmp(argv[1], "long") == 0;
  const auto page_size = static_cast<std::uint32_t>(std::atoi(argv[1]));
  const char* const plus = std::strchr(argv[1], '+');
  const auto remembered = static_cast<std::uint32_t>(plus ? std::atoi(plus + 1) : 0);
  const bool explains = std::strchr(argv[1], '?') != nullptr;
  const std::size_t requests = is_long ? mainstem::run_long() : mainstem::run_chats(page_size, remembered, explains);
  std::printf("%zu\n", requests);
  return 0;
}
