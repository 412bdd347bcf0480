// Linear layers for any number of rows.
//
//   out[r] = round(weight x[r] + bias)      weight [outputs, inputs] as it lies in memory, row by row: nothing is
//   packed; `sums` are not rounded
//
// A few rows of the weight meet a few of x at a time, in registers: of one row as quickly as the memory gives the
// weight, of many as quickly as the machine multiplies. Each number of the result is a sum of float32 in one order,
// which depends on the instructions alone: not on other rows, other outputs or threads.
//
//   lanes      lane l of a vector adds up its products (of pairs), vector after vector; then lanes l and l + 8 are
//              added, l and l + 4, l and l + 2, both that are left, and the bias. A vector has 16 lanes, or 8 without
//              AVX-512. Where pairs of bfloat16 are multiplied in one instruction, a lane has pairs; else float32.
//   tiles      pair after pair, as AMX does it
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

// A layer, and where its results go, [rows, outputs]: to `sums` if there are, without being rounded, else to `out`.
// `bias` may be null.
template <class Number>
struct Layer {
  const Number* weight;
  Int4 packed;
  const Number* bias;
  Number* out;
  std::size_t outputs;
  float* sums = nullptr;

  // Calls write(where results go from the number `at` on).
  template <class Write>
  MAINSTEM_INLINE void into(std::size_t at, const Write& write) const {
    if (sums)
      write(sums + at);
    else
      write(out + at);
  }

  // Lets results begin so many numbers later.
  void skip(std::size_t count) {
    if (sums)
      sums += count;
    else
      out += count;
  }
};

// A number of the Int4 has 8 significant bits at most, and is that of the weight: it does not matter which is read. If
// all layers have one, few rows are computed from it, as it is smaller.

// Computes layers that are given the same: x [rows, inputs]. Without an Int4, there may be any number of inputs.
template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads);

}  // namespace mainstem
