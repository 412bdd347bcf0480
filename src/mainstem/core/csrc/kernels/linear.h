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

// A weight in codes of 4 or 8 bits: scale code + minimum, a float32, and then the nearest Number. Without codes, there
// is none.
//
//   codes    [outputs, inputs / kGroup, bits words]. The number at place p of a group has the code p / 8, from the
//   lowest
//            bits up, of the half word p % 8 (4 bits), or of the word p / 2 % 4 + 4 (p % 2) (8 bits)
//   scales   [outputs, inputs / kGroup, scale and minimum]; in 8 bits there are scales alone: the minimum is -128 scale
//
// In this order both vectors of a pair are a broadcast and a shift, whatever their length. A scale has at most 24 -
// bits significant bits, so its product with a code is exact, and it does not matter whether one instruction adds the
// minimum.
struct Codes {
  const std::uint32_t* codes;
  const float* scales;
  unsigned bits;
};
inline constexpr std::size_t kGroup = 32;

// A layer, and where its results go, [rows, outputs]: to `sums` if there are, without being rounded, else to `out`.
// `bias` may be null.
template <class Number>
struct Layer {
  const Number* weight;
  Codes packed;
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

// The numbers of codes are those of the weight: it does not matter which is read. If all layers have codes, few rows
// are computed from these, as they are smaller.

// Computes layers that are given the same: x [rows, inputs]. Without codes, there may be any number of inputs.
template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads);

}  // namespace mainstem
