// Which instructions this machine has beyond those that everything is compiled for.
//
// A function with a `target` has them. What is inlined into it is compiled for them, too, and has no ABI of its own.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAINSTEM_INLINE inline __attribute__((always_inline))

namespace mainstem {

// The instructions that functions are compiled for.
enum class Isa : std::uint8_t { kPlain, kAvx2, kAvx512 };

#ifdef __x86_64__
#define MAINSTEM_AVX2 __attribute__((target("avx2,fma")))
#define MAINSTEM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define MAINSTEM_AVX2
#define MAINSTEM_AVX512
#endif

// Sets of instructions, each with those before it. Each has an order of sums of its own, so a model's numbers are those
// of one of them.
enum class Instructions : std::uint8_t { kPlain, kAvx2, kAvx512, kDots, kTiles };

namespace detail {

// Returns the most that this machine has; Linux wants to be asked for tiles.
inline Instructions machine() {
  Instructions most = Instructions::kPlain;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) most = Instructions::kAvx2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return most;
  most = Instructions::kAvx512;
  if (!__builtin_cpu_supports("avx512bf16")) return most;
  most = Instructions::kDots;
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kAskForPermission = 0x1023, kTileData = 18;
  std::uint32_t a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr std::uint32_t kBFloat16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBFloat16) && (d & kTile) && syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0)
    most = Instructions::kTiles;
#endif
#endif
  return most;
}

inline std::atomic<Instructions>& chosen() {
  static std::atomic<Instructions> instructions = machine();
  return instructions;
}

}  // namespace detail

// Returns what kernels compute with: the most that this machine has, or less if `limit_instructions` said so.
inline Instructions instructions() {
  return detail::chosen().load(std::memory_order_relaxed);
}

// Lets kernels compute with no more than `most`, if the machine has that.
inline void limit_instructions(Instructions most) {
  detail::chosen() = most < detail::machine() ? most : detail::machine();
}

// Returns the target of functions to call.
inline Isa best_isa() {
  const auto most = instructions();
  if (most >= Instructions::kAvx512) return Isa::kAvx512;
  return most == Instructions::kAvx2 ? Isa::kAvx2 : Isa::kPlain;
}

// Returns whether pairs of bfloat16 are multiplied in one instruction.
inline bool has_dots() {
  return instructions() >= Instructions::kDots;
}

// Returns whether tiles of bfloat16 are multiplied in one instruction.
inline bool has_tiles() {
  return instructions() == Instructions::kTiles;
}

}  // namespace mainstem
