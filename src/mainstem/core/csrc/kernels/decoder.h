// A layer of a decoder as Llama has it, for any number of rows.
//
//   h = norm(x);   q, k, v = linear(h);   q, k = rotate(norm(q), norm(k));   x += linear(attention(q, pages with k, v))
//   h = norm(x);   x += linear(activation(linear(h)) * linear(h))
//
// Each result is rounded where the model's own code rounds it.
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
  Int4 packed;
  const Number* bias;
  std::size_t outputs;
};

// An RMS norm; without a weight, there is none.
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
  void run(Number* x, const Number* cosines, const Number* sines, AttentionPlan& plan, Number* key_pages,
           Number* value_pages, const std::int64_t* slots, unsigned threads) const;

 private:
  // Norms and rotates q [rows, heads, numbers] and k [rows, KV heads, numbers] in place.
  void turn(Number* q, Number* k, const Number* cosines, const Number* sines, std::size_t rows, unsigned threads) const;

  // x += found, both [rows, hidden], and the norm of the sum to `normed`, unless that is null.
  void join(Number* x, const Number* found, Number* normed, std::size_t rows, unsigned threads) const;

  // opened = activation(opened) * widened, both [rows, inner].
  void open(Number* opened, const Number* widened, std::size_t rows, unsigned threads) const;
};

}  // namespace mainstem
