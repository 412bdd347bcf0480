#include "kernels/decoder.h"

#include <algorithm>
#include <array>

#include "kernels/functions.h"

namespace mainstem {

namespace {

// x += y, [count].
template <int kLanes, class Number>
MAINSTEM_INLINE void add(Number* x, const Number* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes)
    store<kLanes>(x + i, load_floats<kLanes>(x + i) + load_floats<kLanes>(y + i));
}

// x = activation(x) * y, [count].
template <int kLanes, class Number>
MAINSTEM_INLINE void gate(Number* x, const Number* y, std::size_t count, Activation activation) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const auto given = load_floats<kLanes>(x + i);
    auto slope = given;  // the result is given times the logistic function of it
    if (activation == Activation::kGeluTanh)
      slope = 1.5957691216057308f * (given + 0.044715f * given * given * given);  // 2 * sqrt(2 / pi)
    const auto active = rounded<kLanes, Number>(given / (1 + exponential<kLanes>(-slope)));
    store<kLanes>(x + i, active * load_floats<kLanes>(y + i));
  }
}

// Rotates the heads of a row by the angles of its position, [numbers] as cosines and sines.
template <int kLanes, class Number>
MAINSTEM_INLINE void rotate(Number* x, const Number* cosines, const Number* sines, std::size_t heads,
                            std::size_t numbers) {
  const auto product = [](const Number* factor, auto given) __attribute__((always_inline)) {
    return rounded<kLanes, Number>(load_floats<kLanes>(factor) * given);
  };
  const std::size_t half = numbers / 2;
  for (std::size_t head = 0; head < heads; ++head, x += numbers)
    for (std::size_t i = 0; i < half; i += kLanes) {
      const auto low = load_floats<kLanes>(x + i), high = load_floats<kLanes>(x + half + i);
      store<kLanes>(x + i, product(cosines + i, low) - product(sines + i, high));
      store<kLanes>(x + half + i, product(cosines + half + i, high) + product(sines + half + i, low));
    }
}

// Works on elements, of rows that are few: one thread does it sooner than others begin.
template <class Number>
struct Elements {
  void (*add)(Number*, const Number*, std::size_t);
  void (*gate)(Number*, const Number*, std::size_t, Activation);
  void (*rotate)(Number*, const Number*, const Number*, std::size_t, std::size_t);
};

template <class Number>
MAINSTEM_AVX512 void add_on_avx512(Number* x, const Number* y, std::size_t count) {
  add<16>(x, y, count);
}
template <class Number>
MAINSTEM_AVX2 void add_on_avx2(Number* x, const Number* y, std::size_t count) {
  add<8>(x, y, count);
}
template <class Number>
MAINSTEM_AVX512 void gate_on_avx512(Number* x, const Number* y, std::size_t count, Activation activation) {
  gate<16>(x, y, count, activation);
}
template <class Number>
MAINSTEM_AVX2 void gate_on_avx2(Number* x, const Number* y, std::size_t count, Activation activation) {
  gate<8>(x, y, count, activation);
}
template <class Number>
MAINSTEM_AVX512 void rotate_on_avx512(Number* x, const Number* cosines, const Number* sines, std::size_t heads,
                                      std::size_t numbers) {
  rotate<16>(x, cosines, sines, heads, numbers);
}
template <class Number>
MAINSTEM_AVX2 void rotate_on_avx2(Number* x, const Number* cosines, const Number* sines, std::size_t heads,
                                  std::size_t numbers) {
  rotate<8>(x, cosines, sines, heads, numbers);
}

template <class Number>
Elements<Number> best_elements() {
  if (best_isa() == Isa::kAvx512) return {add_on_avx512<Number>, gate_on_avx512<Number>, rotate_on_avx512<Number>};
  return {add_on_avx2<Number>, gate_on_avx2<Number>, rotate_on_avx2<Number>};
}

}  // namespace

template <class Number>
void Decoder<Number>::run(Number* x, const Number* cosines, const Number* sines, AttentionPlan& plan, Number* key_pages,
                          Number* value_pages, const std::int64_t* slots, unsigned threads) const {
  const auto elements = best_elements<Number>();
  const std::size_t rows = plan.rows(), numbers = heads.key_numbers;
  const std::size_t query_size = heads.heads * numbers, key_size = heads.kv_heads * numbers;
  const auto norm = [&](const NormWeight<Number>& given, const Number* from, Number* to, std::size_t count,
                        std::size_t width) { rms_norm(from, given.weight, to, count, width, given.rule, threads); };
  thread_local Scratch scratch;
  const std::size_t row = 2 * std::max(hidden, query_size) + std::max(query_size + 2 * key_size, 2 * inner);
  auto* const normed = reinterpret_cast<Number*>(scratch.take(rows * row));
  Number* const found = normed + rows * std::max(hidden, query_size);  // what is added to x
  Number* const q = found + rows * std::max(hidden, query_size);
  Number* const k = q + rows * query_size;
  Number* const v = k + rows * key_size;

  norm(before, x, normed, rows, hidden);
  const std::array<Layer<Number>, 3> given{{{queries.weight, queries.packed, queries.bias, q, query_size},
                                            {keys.weight, keys.packed, keys.bias, k, key_size},
                                            {values.weight, values.packed, values.bias, v, key_size}}};
  multiply<Number>(normed, rows, hidden, given, threads);
  if (of_queries.weight) norm(of_queries, q, q, rows * heads.heads, numbers);
  if (of_keys.weight) norm(of_keys, k, k, rows * heads.kv_heads, numbers);
  for (std::size_t i = 0; i < rows; ++i) {
    elements.rotate(q + i * query_size, cosines + i * numbers, sines + i * numbers, heads.heads, numbers);
    elements.rotate(k + i * key_size, cosines + i * numbers, sines + i * numbers, heads.kv_heads, numbers);
    std::copy_n(k + i * key_size, key_size, key_pages + slots[i] * key_size);
    std::copy_n(v + i * key_size, key_size, value_pages + slots[i] * key_size);
  }
  plan.attend<Number>(q, {key_pages, value_pages, key_size, key_size}, heads, scores, normed, threads);
  const std::array<Layer<Number>, 1> attention{{{attended.weight, attended.packed, attended.bias, found, hidden}}};
  multiply<Number>(normed, rows, query_size, attention, threads);
  elements.add(x, found, rows * hidden);

  norm(after, x, normed, rows, hidden);
  Number* const opened = q + rows * inner;
  const std::array<Layer<Number>, 2> wide{
      {{gate.weight, gate.packed, gate.bias, q, inner}, {up.weight, up.packed, up.bias, opened, inner}}};
  multiply<Number>(normed, rows, hidden, wide, threads);
  elements.gate(q, opened, rows * inner, activation);
  const std::array<Layer<Number>, 1> narrow{{{down.weight, down.packed, down.bias, found, hidden}}};
  multiply<Number>(q, rows, inner, narrow, threads);
  elements.add(x, found, rows * hidden);
}

template struct Decoder<float>;
template struct Decoder<BFloat16>;

}  // namespace mainstem
