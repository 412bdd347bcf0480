#include "kernels/scans.h"

#include "kernels/parallel.h"
#include "kernels/vectors.h"

namespace mainstem {

namespace {

// One row and head: its first token's numbers, and how far the next token's are.
struct Head {
  const float *q, *k, *v, *decay, *beta;
  float *state, *out;
  std::size_t tokens, keys, values;
  std::size_t key_step, value_step, decay_step, beta_step;
  bool by_key;
};

// Columns of the state do not depend on each other, so a few of them go through all tokens while they are in the cache.
template <class Floats>
MAINSTEM_INLINE void scan_columns(const Head& head, std::size_t column) {
  float* state = head.state + column;
  for (std::size_t t = 0; t < head.tokens; ++t) {
    const float *q = head.q + t * head.key_step, *k = head.k + t * head.key_step;
    const float* decay = head.decay + t * head.decay_step;
    Floats given = load<Floats>(head.v + t * head.value_step + column), out = {};
    if (head.beta) {
      Floats known = {};
      for (std::size_t i = 0; i < head.keys; ++i)
        known += k[i] * (load<Floats>(state + i * head.values) * decay[head.by_key ? i : 0]);
      given = head.beta[t * head.beta_step] * (given - known);
    }
    for (std::size_t i = 0; i < head.keys; ++i) {
      float* row = state + i * head.values;
      Floats numbers = load<Floats>(row) * decay[head.by_key ? i : 0];
      numbers += k[i] * given;
      std::memcpy(row, &numbers, sizeof numbers);
      out += q[i] * numbers;
    }
    std::memcpy(head.out + t * head.value_step + column, &out, sizeof out);
  }
}

template <int kLanes>
MAINSTEM_INLINE void scan_head(const Head& head) {
  std::size_t column = 0;
  for (constexpr int kWide = 4 * kLanes; column + kWide <= head.values; column += kWide)
    scan_columns<typename Lanes<kWide>::Floats>(head, column);
  for (; column + kLanes <= head.values; column += kLanes)
    scan_columns<typename Lanes<kLanes>::Floats>(head, column);
  for (; column < head.values; ++column)
    scan_columns<float>(head, column);
}

MAINSTEM_AVX512 void on_avx512(const Head& head) {
  scan_head<16>(head);
}

MAINSTEM_AVX2 void on_avx2(const Head& head) {
  scan_head<8>(head);
}

void on_any(const Head& head) {
  scan_head<4>(head);
}

}  // namespace

void scan(const float* q, const float* k, const float* v, const float* decay, const float* beta, float* state,
          float* out, const ScanSizes& sizes, unsigned threads) {
  const auto& [rows, tokens, heads, keys, values, by_key] = sizes;
  const std::size_t decays = by_key ? keys : 1;
  const Isa isa = best_isa();
  const auto run = isa == Isa::kAvx512 ? on_avx512 : isa == Isa::kAvx2 ? on_avx2 : on_any;
  const std::size_t all_heads = heads, all_tokens = tokens, all_keys = keys, all_values = values;
  const bool each_key = by_key;
  share_out(rows * heads, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t head = i / all_heads * all_tokens * all_heads + i % all_heads;  // of the first token
      run({q + head * all_keys, k + head * all_keys, v + head * all_values, decay + head * decays,
           beta ? beta + head : nullptr, state + i * all_keys * all_values, out + head * all_values, all_tokens,
           all_keys, all_values, all_heads * all_keys, all_heads * all_values, all_heads * decays, all_heads,
           each_key});
    }
  });
}

}  // namespace mainstem
