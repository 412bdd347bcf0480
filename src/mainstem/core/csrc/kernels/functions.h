// Functions of vectors: exponentials, what is made of them, and sums and maxima of lanes.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/vectors.h"

namespace mainstem {

template <int kLanes, std::size_t... kLane>
MAINSTEM_INLINE Pair<kLanes / 2> halved(typename Lanes<kLanes>::Floats v, std::index_sequence<kLane...>) {
  return {__builtin_shufflevector(v, v, kLane...), __builtin_shufflevector(v, v, (kLane + kLanes / 2)...)};
}

template <int kLanes>
MAINSTEM_INLINE float total_of(typename Lanes<kLanes>::Floats v) {
  const Floats4 four = fold<kLanes>(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Returns the larger of each two; b where one is NaN.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats larger_of(typename Lanes<kLanes>::Floats a,
                                                         typename Lanes<kLanes>::Floats b) {
#ifdef __x86_64__
  if constexpr (kLanes == 16) {  // GCC 12 makes two instructions of it, a comparison and a choice
    __asm__("vmaxps %2, %1, %0" : "=v"(a) : "v"(a), "v"(b));
    return a;
  }
#endif
  return a > b ? a : b;
}

template <int kLanes>
MAINSTEM_INLINE float highest_of(typename Lanes<kLanes>::Floats v) {
  if constexpr (kLanes == 4) {
    return std::max(std::max(v[0], v[1]), std::max(v[2], v[3]));
  } else {
    const auto halves = halved<kLanes>(v, std::make_index_sequence<kLanes / 2>{});
    return highest_of<kLanes / 2>(larger_of<kLanes / 2>(halves.first, halves.second));
  }
}

// Returns 0, 1, 2, ...
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Signed numbered() {
  static constexpr std::int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<typename Lanes<kLanes>::Signed>(kNumbers);
}

// Returns e to the power of each, to 2 units in the last place; 0 below -87, where a float32 would lose bits. NaN stays
// NaN. Cody and Waite's reduction to |r| <= ln(2) / 2, and Taylor's series.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats exponential(typename Lanes<kLanes>::Floats x) {
  using Floats = typename Lanes<kLanes>::Floats;
  using Words = typename Lanes<kLanes>::Words;
  const Floats zero = {};
  const auto vanishes = x < -87.0f;
  x = vanishes ? zero - 87.0f : x;
  x = x > 88.0f ? zero + 88.0f : x;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number
  const Floats shifted = x * 1.44269504088896341f + kMagic;
  const Floats whole = shifted - kMagic;
  const Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats series = zero + 1.0f / 5040;
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    series = series * r + factor;
  const Words power = (load<Words>(&shifted) << 23) + (127u << 23);  // the lowest bits of `shifted` are the number
  const Floats result = series * load<Floats>(&power);
  return vanishes ? zero : result;
}

template <int kLanes>
MAINSTEM_INLINE float exponential(float x) {
  return exponential<kLanes>(typename Lanes<kLanes>::Floats{} + x)[0];
}

// Returns 2 to the power of each, of at most 0, to 2 units in the last place; 0 from -127 down. NaN stays NaN.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats power_of_two(typename Lanes<kLanes>::Floats x) {
  using Floats = typename Lanes<kLanes>::Floats;
  using Words = typename Lanes<kLanes>::Words;
  const Floats zero = {};
  x = larger_of<kLanes>(zero - 127.0f, x);
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number
  const Floats shifted = x + kMagic;
  const Floats r = x - (shifted - kMagic);
  Floats series = r * 0.00132647274f + 0.00967151286f;  // the best of this degree on [-0.5, 0.5] that is 1 at 0
  series = series * r + 0.0555073374f;
  series = series * r + 0.240222421f;
  series = series * r + 0.693146978f;
  series = series * r + 1.0f;
  const Words power = (load<Words>(&shifted) << 23) + (127u << 23);  // the lowest bits of `shifted` are the number
  return series * load<Floats>(&power);
}

template <int kLanes>
MAINSTEM_INLINE float power_of_two(float x) {
  return power_of_two<kLanes>(typename Lanes<kLanes>::Floats{} + x)[0];
}

// Returns x times the logistic function of `slope`.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats gated(typename Lanes<kLanes>::Floats x,
                                                     typename Lanes<kLanes>::Floats slope) {
  return x / (1 + exponential<kLanes>(-slope));
}

template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats silu(typename Lanes<kLanes>::Floats x) {
  return gated<kLanes>(x, x);
}

// Returns the form of GELU that is made of a hyperbolic tangent.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats gelu_tanh(typename Lanes<kLanes>::Floats x) {
  return gated<kLanes>(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));  // 2 * sqrt(2 / pi)
}

// Returns each or its opposite, whichever is not negative. NaN stays NaN.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats magnitude(typename Lanes<kLanes>::Floats x) {
  return x < 0.0f ? -x : x;
}

// Returns x times the normal distribution's share below x. The complementary error function is Chebyshev's fit of
// Numerical Recipes, good to 1.2e-7 of each value.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats gelu(typename Lanes<kLanes>::Floats x) {
  using Floats = typename Lanes<kLanes>::Floats;
  const Floats z = magnitude<kLanes>(x) * 0.70710678118654752f;
  const Floats t = 1 / (1 + 0.5f * z);
  Floats series = t * 0.17087277f - 0.82215223f;
  for (const float factor :
       {1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f})
    series = series * t + factor;
  const Floats above = 0.5f * t * exponential<kLanes>(series - z * z);  // the share above |x|
  return x * (x < 0.0f ? above : 1 - above);
}

template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats sigmoid(typename Lanes<kLanes>::Floats x) {
  const auto power = exponential<kLanes>(-magnitude<kLanes>(x));
  return (x < 0.0f ? power : power * 0 + 1) / (1 + power);
}

// Returns log(1 + e^x). With u = e^-|x|, log(1 + u) is twice the area tangent of u / (2 + u), which is at most 1 / 3.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats softplus(typename Lanes<kLanes>::Floats x) {
  using Floats = typename Lanes<kLanes>::Floats;
  const Floats power = exponential<kLanes>(-magnitude<kLanes>(x));
  const Floats s = power / (2 + power), square = s * s;
  Floats series = square * (1.0f / 15) + 1.0f / 13;
  for (const float factor : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
    series = series * square + factor;
  return (x < 0.0f ? power * 0 : x) + 2 * s * series;
}

// Returns cap * tanh(x / cap).
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats capped(typename Lanes<kLanes>::Floats x, float cap) {
  const auto power = exponential<kLanes>(x * (2 / cap));  // infinite x: 0, or a number so large that the quotient is 1
  return cap * (power - 1) / (power + 1);
}

namespace detail {

template <int kStep, bool kLow, class Floats, std::size_t... kLane>
MAINSTEM_INLINE Floats interleaved(Floats a, Floats b, std::index_sequence<kLane...>) {
  constexpr int kLanes = sizeof...(kLane);
  return __builtin_shufflevector(a, b,
                                 (kLow ? (kLane & kStep ? int(kLane) - kStep + kLanes : int(kLane))
                                       : (kLane & kStep ? int(kLane) + kLanes : int(kLane) + kStep))...);
}

template <int kLanes, int kStep>
MAINSTEM_INLINE void exchange_blocks(typename Lanes<kLanes>::Floats* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const auto a = rows[i], b = rows[i + kStep];
    rows[i] = interleaved<kStep, true>(a, b, std::make_index_sequence<kLanes>{});
    rows[i + kStep] = interleaved<kStep, false>(a, b, std::make_index_sequence<kLanes>{});
  }
}

}  // namespace detail

// Transposes a square: blocks of half its size change places, then within each block (Eklundh, 1972).
template <int kLanes>
MAINSTEM_INLINE void transpose(typename Lanes<kLanes>::Floats* rows) {
  if constexpr (kLanes == 16) detail::exchange_blocks<kLanes, 8>(rows);
  detail::exchange_blocks<kLanes, 4>(rows);
  detail::exchange_blocks<kLanes, 2>(rows);
  detail::exchange_blocks<kLanes, 1>(rows);
}

}  // namespace mainstem
