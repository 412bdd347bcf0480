// A layer of a decoder as Llama has it, for any number of rows.
//
//   h = norm(x);   q, k, v = linear(h);   q, k = rotate(norm(q), norm(k));   x += linear(attention(q, pages with k, v))
//   h = norm(x);   x += linear(activation(linear(h)) * linear(h))
//
// A layer rounds factors of weights, queries, keys and values to the model's numbers. All else is float32: x, and the
// sums and activations between.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/vectors.h"

namespace mainstem {

enum class Activation : std::uint8_t { kSilu, kGeluTanh };

// A linear layer: weight [outputs, inputs], bias [outputs] or null.
template <class Number>
struct Matrix {
  const Number* weight;
  Codes packed;
  const Number* bias;
  std::size_t outputs;
};

// An RMS norm, whose rule does not round; without a weight, there is none.
template <class Number>
struct NormWeight {
  const Number* weight;
  NormRule rule;
};

template <class Number>
struct Decoder {
  std::size_t hidden, inner;  // numbers of a row of x, and between the last two linear layers
  Heads heads;                // keys and values have equally many numbers, a multiple of kRowStep
  Scores<Number> scores;
  NormWeight<Number> before, after, of_queries, of_keys;
  Matrix<Number> queries, keys, values, attended, gate, up, down;
  Activation activation;

  // Computes x [rows, hidden] in place, and writes new keys and values to their slots.
  //
  //   cosines, sines   [rows, numbers of a key], as transformers' `apply_rotary_pos_emb` takes them
  //   slots            [rows]
  void run(float* x, const Number* cosines, const Number* sines, AttentionPlan& plan, Number* key_pages,
           Number* value_pages, const std::int64_t* slots, unsigned threads) const;

 private:
  // Norms heads [rows, heads, numbers] in place, and rotates them to `turned`.
  void turn(float* x, std::size_t count, const NormWeight<Number>& norm, const Number* cosines, const Number* sines,
            Number* turned, std::size_t rows) const;

  // x += found, both [rows, hidden], and the norm of the sum to `normed`, unless that is null.
  void join(float* x, const float* found, Number* normed, std::size_t rows, unsigned threads) const;

  // opened = activation(given) * widened, all [rows, inner].
  void open(const float* given, const float* widened, Number* opened, std::size_t rows, unsigned threads) const;
};

}  // namespace mainstem
