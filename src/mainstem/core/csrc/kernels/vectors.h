// Vectors of float32, whatever the machine: the compiler makes instructions of them that a function's `target` allows.
//
// Everything here is inlined into such a function, so none of it has an ABI of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "structure/isa.h"

namespace mainstem {

// A bfloat16 is the upper half of a float32.
using BFloat16 = std::uint16_t;

template <int kLanes>
struct Lanes {  // in the older form: the compiler ignores the attribute of a `using` here
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef std::int32_t Signed __attribute__((vector_size(4 * kLanes)));
  typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef std::uint16_t Pairs __attribute__((vector_size(4 * kLanes)));
  typedef std::uint64_t Quads __attribute__((vector_size(4 * kLanes)));
};

using Floats4 = Lanes<4>::Floats;

template <class Vector>
MAINSTEM_INLINE Vector load(const void* at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof vector);
  return vector;
}

MAINSTEM_INLINE float widen(float number) {
  return number;
}
MAINSTEM_INLINE float widen(BFloat16 number) {
  const std::uint32_t bits = std::uint32_t{number} << 16;
  return load<float>(&bits);
}

template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats load_floats(const float* at) {
  return load<typename Lanes<kLanes>::Floats>(at);
}
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats load_floats(const BFloat16* at) {
  using Words = typename Lanes<kLanes>::Words;
  const Words bits = __builtin_convertvector(load<typename Lanes<kLanes>::Halves>(at), Words) << 16;
  return load<typename Lanes<kLanes>::Floats>(&bits);
}

// Returns the bits of each, the upper half of which are those of the nearest bfloat16, the even one of two; NaN stays
// NaN.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Words nearest(typename Lanes<kLanes>::Floats floats) {
  using Words = typename Lanes<kLanes>::Words;
  const Words bits = load<Words>(&floats);
  const Words is_nan = Words((bits & 0x7fffffffu) > 0x7f800000u);
  return (is_nan & 0x7fc00000u) | (~is_nan & (bits + 0x7fffu + ((bits >> 16) & 1u)));
}

// Writes the first `kCount` numbers of a vector.
template <int kLanes, int kCount = kLanes>
MAINSTEM_INLINE void store(float* to, typename Lanes<kLanes>::Floats floats) {
  std::memcpy(to, &floats, kCount * sizeof *to);
}
template <int kLanes, int kCount = kLanes>
MAINSTEM_INLINE void store(BFloat16* to, typename Lanes<kLanes>::Floats floats) {
  const auto halves = __builtin_convertvector(nearest<kLanes>(floats) >> 16, typename Lanes<kLanes>::Halves);
  std::memcpy(to, &halves, kCount * sizeof *to);
}

// Returns the first `count` numbers, and zeros.
template <int kLanes, class Number>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats load_first(const Number* at, std::size_t count) {
  if (count >= kLanes) return load_floats<kLanes>(at);
  Number numbers[kLanes] = {};
  std::memcpy(numbers, at, count * sizeof *at);
  return load_floats<kLanes>(numbers);
}
template <int kLanes, class Number>
MAINSTEM_INLINE void store_first(Number* to, typename Lanes<kLanes>::Floats floats, std::size_t count) {
  if (count >= kLanes) return store<kLanes>(to, floats);
  Number numbers[kLanes];
  store<kLanes>(numbers, floats);
  std::memcpy(to, numbers, count * sizeof *to);
}

// Returns each as a Number would keep it.
template <int kLanes, class Number>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats rounded(typename Lanes<kLanes>::Floats floats) {
  if constexpr (sizeof(Number) == sizeof(float)) return floats;
  Number numbers[kLanes];
  store<kLanes>(numbers, floats);
  return load_floats<kLanes>(numbers);
}

// Two vectors of neighbours in memory: those at even and at odd places of bfloat16, else one vector after the other.
template <int kLanes>
struct Pair {
  typename Lanes<kLanes>::Floats first, second;
};

template <int kLanes>
MAINSTEM_INLINE Pair<kLanes> load_pair(const float* at) {
  using Floats = typename Lanes<kLanes>::Floats;
  return {load<Floats>(at), load<Floats>(at + kLanes)};
}
template <int kLanes>
MAINSTEM_INLINE Pair<kLanes> load_pair(const BFloat16* at) {
  using Floats = typename Lanes<kLanes>::Floats;
  const auto both = load<typename Lanes<kLanes>::Words>(at);
  const auto even = both << 16, odd = both & 0xffff0000u;
  return {load<Floats>(&even), load<Floats>(&odd)};
}

// Returns numbers at even and at odd places in their order: the first half, and the second.
template <int kLanes, std::size_t... kLane>
MAINSTEM_INLINE Pair<kLanes> zipped(Pair<kLanes> pair, std::index_sequence<kLane...>) {
  return {__builtin_shufflevector(pair.first, pair.second, (kLane / 2 + kLane % 2 * kLanes)...),
          __builtin_shufflevector(pair.first, pair.second, (kLanes / 2 + kLane / 2 + kLane % 2 * kLanes)...)};
}

// Writes what `load_pair` would read.
template <int kLanes>
MAINSTEM_INLINE void store_pair(float* to, Pair<kLanes> pair) {
  store<kLanes>(to, pair.first);
  store<kLanes>(to + kLanes, pair.second);
}
template <int kLanes>
MAINSTEM_INLINE void store_pair(BFloat16* to, Pair<kLanes> pair) {
  const auto both = (nearest<kLanes>(pair.first) >> 16) | (nearest<kLanes>(pair.second) & 0xffff0000u);
  std::memcpy(to, &both, sizeof both);
}

// Returns totals plus the products of bfloat16, two for each total. Only where `has_dots`.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats dots(typename Lanes<kLanes>::Floats totals,
                                                    typename Lanes<kLanes>::Words a, typename Lanes<kLanes>::Words b) {
#ifdef __x86_64__
  // Not an intrinsic, which cannot be inlined into a function of another target before that one is inlined.
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(totals) : "v"(a), "v"(b));
#endif
  return totals;
}

// Returns pairs of the nearest bfloat16: those of the lower half, then of the upper. Only where `has_dots`.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Words packed(typename Lanes<kLanes>::Floats low,
                                                     typename Lanes<kLanes>::Floats high) {
  typename Lanes<kLanes>::Words pairs = {};
#ifdef __x86_64__
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(low), "v"(high));
#endif
  return pairs;
}

// Returns four numbers with the sum of a vector's lanes.
template <int kLanes>
MAINSTEM_INLINE Floats4 fold(typename Lanes<kLanes>::Floats v) {
  if constexpr (kLanes == 16)
    return fold<8>(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  else
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}

// Returns the sums of each of four.
MAINSTEM_INLINE Floats4 sums(Floats4 a, Floats4 b, Floats4 c, Floats4 d) {
  const Floats4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Floats4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// Returns the sums of the lanes of each of kCount vectors, at most 4; the rest is 0. The order of additions is that of
// `fold`, then of `sums`.
template <int kLanes, int kCount>
MAINSTEM_INLINE Floats4 totals_of(const typename Lanes<kLanes>::Floats* v) {
  if constexpr (kLanes == 16 && kCount == 4) {  // the same in fewer instructions
    using Floats = typename Lanes<16>::Floats;
    const auto halves = [](Floats a, Floats b) __attribute__((always_inline)) {
      return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    const Floats ab = halves(v[0], v[1]), cd = halves(v[2], v[3]);
    Floats each = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    each += __builtin_shufflevector(each, each, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    each += __builtin_shufflevector(each, each, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return __builtin_shufflevector(each, each, 0, 4, 8, 12);
  } else {
    Floats4 folded[4] = {};
#pragma GCC unroll 4
    for (int n = 0; n < kCount; ++n)
      folded[n] = fold<kLanes>(v[n]);
    return sums(folded[0], folded[1], folded[2], folded[3]);
  }
}

// The sizes of a layer of a decoder are multiples of this.
inline constexpr std::size_t kRowStep = 32;

}  // namespace mainstem
