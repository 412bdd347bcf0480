// Linear layers for few rows, at the speed at which the memory gives the weights.
//
//   out[r] = weight x[r] + bias      weight [outputs, inputs] as it lies in memory, row by row: nothing is packed
//
// A matrix product of a library packs blocks of its operands first, or waits for numbers that are used once. Here two
// rows of the weight meet eight of x at a time, in registers. The rows of the weight that come next are prefetched.
// A row of the result does not depend on the other rows.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/vectors.h"

namespace mainstem {

// A layer, and where its results go: [rows, outputs]. `bias` may be null.
template <class Number>
struct Layer {
  const Number* weight;
  const Number* bias;
  Number* out;
  std::size_t outputs;
};

// Computes layers that are given the same: x [rows, inputs], inputs a multiple of kRowStep. Sums are float32.
template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads);

}  // namespace mainstem
