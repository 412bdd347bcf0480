// Shares work among the threads of PyTorch.
//
// PyTorch's threads wait for more work for a while without sleeping. Threads of our own would fight them for the cores,
// so the runtime of OpenMP that PyTorch has loaded runs the work on the same ones.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace mainstem {

// Calls work(begin, end) for parts of [0, size), each `part` long, on up to `threads` threads, one of them the
// caller's. Without such a runtime in the process, the caller does it all. `work` must not throw.
template <class Work>
void share_out(std::size_t size, std::size_t part, unsigned threads, const Work& work) {
  struct Shared {
    std::size_t size, part;
    const Work& work;
    std::atomic<std::size_t> taken = 0;
  } shared{size, part, work};
  const auto take = [](void* data) {
    auto& [size, part, work, taken] = *static_cast<Shared*>(data);
    for (std::size_t begin; (begin = taken.fetch_add(part, std::memory_order_relaxed)) < size;)
      work(begin, std::min(begin + part, size));
  };
  using Run = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto run = reinterpret_cast<Run>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (threads > 1 && part < size && run)
    run(take, &shared, threads, 0);
  else
    take(&shared);
}

// The same for rows of `width` numbers. Of few numbers, one thread has done all before others begin.
template <class Work>
void share_rows(std::size_t rows, std::size_t width, unsigned threads, const Work& work) {
  constexpr std::size_t kAlone = 1 << 15, kPart = 8;
  share_out(rows, rows * width <= kAlone ? rows : kPart, threads, work);
}

}  // namespace mainstem
