// Scans of linear attention with a decay: a state is read and written token by token, in one order for any number.
#pragma once

#include <cstddef>

namespace mainstem {

// Sizes of one call. All tensors are contiguous float32.
struct ScanSizes {
  std::size_t rows, tokens, heads, keys, values;
  bool by_key;  // a decay for each number of a key; else one for a head
};

// For each token t, of each row and head, with the state S [keys, values]:
//
//   S = decay_t S;   new = beta_t (v_t - k_t S), or v_t without `beta`;   S = S + k_t new;   out_t = q_t S
//
// q and k are [rows, tokens, heads, keys], v and out [rows, tokens, heads, values], decay [rows, tokens, heads, keys]
// or [rows, tokens, heads], beta the latter or null, and `state` [rows, heads, keys, values] is overwritten.
void scan(const float* q, const float* k, const float* v, const float* decay, const float* beta, float* state,
          float* out, const ScanSizes& sizes, unsigned threads);

}  // namespace mainstem
