// Which instructions this machine has beyond those that everything is compiled for.
//
// A function with a `target` has them. What is inlined into it is compiled for them, too, and has no ABI of its own.
#pragma once

#include <cstdint>

#define MAINSTEM_INLINE inline __attribute__((always_inline))

namespace mainstem {

// The instructions that functions are compiled for.
enum class Isa : std::uint8_t { kNone, kAvx2, kAvx512 };

#ifdef __x86_64__
#define MAINSTEM_AVX2 __attribute__((target("avx2,fma")))
#define MAINSTEM_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define MAINSTEM_AVX2
#define MAINSTEM_AVX512
#endif

// Returns the best that this machine has.
inline Isa best_isa() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kNone;
}

}  // namespace mainstem
