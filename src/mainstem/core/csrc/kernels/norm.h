// RMS norm: each row divided by the root of the mean of its squares, times a gain.
#pragma once

#include <cstddef>

#include "kernels/vectors.h"

namespace mainstem {

// What differs between families of models.
struct NormRule {
  float epsilon;  // added to the mean of squares
  float offset;   // gain = weight + offset
  bool rounds;    // to the weight's numbers before the gain, and again after it
};

// Computes rows [rows, width] of x to `out`. Sums and factors are float32.
template <class Given, class Number, class Result>
void rms_norm(const Given* x, const Number* weight, Result* out, std::size_t rows, std::size_t width,
              const NormRule& rule, unsigned threads);

}  // namespace mainstem
