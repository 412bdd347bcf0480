// Linear layers for few rows, at the speed at which the memory gives the weights.
//
//   out[r] = weight x[r] + bias      weight [outputs, inputs] as it lies in memory, row by row: nothing is packed
//
// A matrix product of a library packs blocks of its operands first, or waits for numbers that are used once. Here a
// few rows of the weight meet a few of x at a time, in registers. The rows of the weight that come next are prefetched.
// Where the machine multiplies pairs of bfloat16, nothing is widened. A row of the result does not depend on the other
// rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/vectors.h"

namespace mainstem {

// A weight in 4 bits a number, each (code - 8) scale. Without codes, there is none.
//
//   codes    [outputs, inputs / kGroup, 2 words of those at even places, 2 of those at odd ones]: the number at place
//            2 i is the code i / 2 of the word i % 2, from its lowest bits up, and so is that at 2 i + 1
//   scales   [outputs, inputs / kGroup]
//
// In this order both vectors of a pair are a broadcast and a shift, whatever their length.
struct Int4 {
  const std::uint32_t* codes;
  const float* scales;
};
inline constexpr std::size_t kGroup = 32;

// Rows up to which a weight is read as its Int4.
inline constexpr std::size_t kInt4Rows = 7;

// A layer, and where its results go: [rows, outputs]. `bias` may be null.
template <class Number>
struct Layer {
  const Number* weight;
  Int4 packed;
  const Number* bias;
  Number* out;
  std::size_t outputs;
};

// Computes layers that are given the same: x [rows, inputs], inputs a multiple of kRowStep. Sums are float32.
// Few rows are computed from the Int4 of the weights if all layers have one.
template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads);

}  // namespace mainstem
