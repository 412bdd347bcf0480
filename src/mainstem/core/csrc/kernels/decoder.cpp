#include "kernels/decoder.h"

#include <algorithm>
#include <array>

#include "kernels/functions.h"
#include "kernels/parallel.h"

namespace mainstem {

namespace {

constexpr std::size_t kRowsOpened = 512;  // rows of the MLP at a time: what is between its layers stays small

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
    const auto active = activation == Activation::kGeluTanh ? gelu_tanh<kLanes>(given) : silu<kLanes>(given);
    store<kLanes>(x + i, rounded<kLanes, Number>(active) * load_floats<kLanes>(y + i));
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

// Works on elements.
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
  if (best_isa() == Isa::kAvx2) return {add_on_avx2<Number>, gate_on_avx2<Number>, rotate_on_avx2<Number>};
  return {add<8, Number>, gate<8, Number>, rotate<8, Number>};
}

}  // namespace

template <class Number>
void Decoder<Number>::run(Number* x, const Number* cosines, const Number* sines, AttentionPlan& plan, Number* key_pages,
                          Number* value_pages, const std::int64_t* slots, unsigned threads) const {
  const std::size_t rows = plan.rows(), numbers = heads.key_numbers;
  const std::size_t query_size = heads.heads * numbers, key_size = heads.kv_heads * numbers;
  thread_local Scratch scratch;
  const std::size_t most = std::min(rows, kRowsOpened), wide_row = std::max(hidden, query_size);
  const std::size_t middle = std::max(rows * (query_size + 2 * key_size), most * 2 * inner);
  auto* const normed = reinterpret_cast<Number*>(scratch.take(2 * rows * wide_row + middle));
  Number* const found = normed + rows * wide_row;  // what is added to x
  Number* const q = found + rows * wide_row;
  Number* const k = q + rows * query_size;
  Number* const v = k + rows * key_size;

  rms_norm(x, before.weight, normed, rows, hidden, before.rule, threads);
  const std::array<Layer<Number>, 3> given{{{queries.weight, queries.packed, queries.bias, q, query_size},
                                            {keys.weight, keys.packed, keys.bias, k, key_size},
                                            {values.weight, values.packed, values.bias, v, key_size}}};
  multiply<Number>(normed, rows, hidden, given, threads);
  turn(q, k, cosines, sines, rows, threads);
  for (std::size_t i = 0; i < rows; ++i) {
    std::copy_n(k + i * key_size, key_size, key_pages + slots[i] * key_size);
    std::copy_n(v + i * key_size, key_size, value_pages + slots[i] * key_size);
  }
  plan.attend<Number>(q, {key_pages, value_pages, key_size, key_size}, heads, scores, normed, threads);
  const std::array<Layer<Number>, 1> attention{{{attended.weight, attended.packed, attended.bias, found, hidden}}};
  multiply<Number>(normed, rows, query_size, attention, threads);
  join(x, found, normed, rows, threads);

  Number* const widened = q + most * inner;
  for (std::size_t i = 0; i < rows; i += most) {
    const std::size_t count = std::min(most, rows - i);
    const std::array<Layer<Number>, 2> wide{
        {{gate.weight, gate.packed, gate.bias, q, inner}, {up.weight, up.packed, up.bias, widened, inner}}};
    multiply<Number>(normed + i * hidden, count, hidden, wide, threads);
    open(q, widened, count, threads);
    const std::array<Layer<Number>, 1> narrow{{{down.weight, down.packed, down.bias, found + i * hidden, hidden}}};
    multiply<Number>(q, count, inner, narrow, threads);
  }
  join(x, found, nullptr, rows, threads);
}

template <class Number>
void Decoder<Number>::turn(Number* q, Number* k, const Number* cosines, const Number* sines, std::size_t rows,
                           unsigned threads) const {
  const auto rotate = best_elements<Number>().rotate;
  const std::size_t numbers = heads.key_numbers;
  const auto part = [&](Number* x, std::size_t count, const NormWeight<Number>& norm, std::size_t begin,
                        std::size_t end) {
    const std::size_t width = count * numbers;
    Number* const first = x + begin * width;
    if (norm.weight) rms_norm(first, norm.weight, first, (end - begin) * count, numbers, norm.rule, 1);
    for (std::size_t row = begin; row < end; ++row)
      rotate(x + row * width, cosines + row * numbers, sines + row * numbers, count, numbers);
  };
  share_rows(rows, (heads.heads + heads.kv_heads) * numbers, threads, [&](std::size_t begin, std::size_t end) {
    part(q, heads.heads, of_queries, begin, end);
    part(k, heads.kv_heads, of_keys, begin, end);
  });
}

template <class Number>
void Decoder<Number>::join(Number* x, const Number* found, Number* normed, std::size_t rows, unsigned threads) const {
  const auto add = best_elements<Number>().add;
  share_rows(rows, hidden, threads, [&](std::size_t begin, std::size_t end) {
    const std::size_t at = begin * hidden;
    add(x + at, found + at, (end - begin) * hidden);
    if (normed) rms_norm(x + at, after.weight, normed + at, end - begin, hidden, after.rule, 1);
  });
}

template <class Number>
void Decoder<Number>::open(Number* opened, const Number* widened, std::size_t rows, unsigned threads) const {
  const auto gate = best_elements<Number>().gate;
  share_rows(rows, inner, threads, [&](std::size_t begin, std::size_t end) {
    gate(opened + begin * inner, widened + begin * inner, (end - begin) * inner, activation);
  });
}

template struct Decoder<float>;
template struct Decoder<BFloat16>;

}  // namespace mainstem
