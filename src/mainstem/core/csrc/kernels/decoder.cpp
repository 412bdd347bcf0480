#include "kernels/decoder.h"

#include <algorithm>
#include <array>

#include "kernels/functions.h"
#include "kernels/parallel.h"

namespace mainstem {

namespace {

constexpr std::size_t kRowsOpened = 512;  // rows of the MLP at a time: what is between its layers stays small

// x += y, [count].
template <int kLanes>
MAINSTEM_INLINE void add(float* x, const float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes)
    store<kLanes>(x + i, load_floats<kLanes>(x + i) + load_floats<kLanes>(y + i));
}

// out = activation(x) * y, [count].
template <int kLanes, class Number>
MAINSTEM_INLINE void gate(const float* x, const float* y, Number* out, std::size_t count, Activation activation) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    const auto given = load_floats<kLanes>(x + i);
    const auto active = activation == Activation::kGeluTanh ? gelu_tanh<kLanes>(given) : silu<kLanes>(given);
    store<kLanes>(out + i, active * load_floats<kLanes>(y + i));
  }
}

// Rotates the heads of a row by the angles of its position, [numbers] as cosines and sines.
template <int kLanes, class Number>
MAINSTEM_INLINE void rotate(const float* x, Number* out, const Number* cosines, const Number* sines, std::size_t heads,
                            std::size_t numbers) {
  const std::size_t half = numbers / 2;
  for (std::size_t head = 0; head < heads; ++head, x += numbers, out += numbers)
    for (std::size_t i = 0; i < half; i += kLanes) {
      const auto low = load_floats<kLanes>(x + i), high = load_floats<kLanes>(x + half + i);
      store<kLanes>(out + i, load_floats<kLanes>(cosines + i) * low - load_floats<kLanes>(sines + i) * high);
      store<kLanes>(out + half + i,
                    load_floats<kLanes>(cosines + half + i) * high + load_floats<kLanes>(sines + half + i) * low);
    }
}

// Works on elements.
template <class Number>
struct Elements {
  void (*add)(float*, const float*, std::size_t);
  void (*gate)(const float*, const float*, Number*, std::size_t, Activation);
  void (*rotate)(const float*, Number*, const Number*, const Number*, std::size_t, std::size_t);
};

MAINSTEM_AVX512 void add_on_avx512(float* x, const float* y, std::size_t count) {
  add<16>(x, y, count);
}
MAINSTEM_AVX2 void add_on_avx2(float* x, const float* y, std::size_t count) {
  add<8>(x, y, count);
}
template <class Number>
MAINSTEM_AVX512 void gate_on_avx512(const float* x, const float* y, Number* out, std::size_t count,
                                    Activation activation) {
  gate<16>(x, y, out, count, activation);
}
template <class Number>
MAINSTEM_AVX2 void gate_on_avx2(const float* x, const float* y, Number* out, std::size_t count, Activation activation) {
  gate<8>(x, y, out, count, activation);
}
template <class Number>
MAINSTEM_AVX512 void rotate_on_avx512(const float* x, Number* out, const Number* cosines, const Number* sines,
                                      std::size_t heads, std::size_t numbers) {
  rotate<16>(x, out, cosines, sines, heads, numbers);
}
template <class Number>
MAINSTEM_AVX2 void rotate_on_avx2(const float* x, Number* out, const Number* cosines, const Number* sines,
                                  std::size_t heads, std::size_t numbers) {
  rotate<8>(x, out, cosines, sines, heads, numbers);
}

template <class Number>
Elements<Number> best_elements() {
  if (best_isa() == Isa::kAvx512) return {add_on_avx512, gate_on_avx512<Number>, rotate_on_avx512<Number>};
  if (best_isa() == Isa::kAvx2) return {add_on_avx2, gate_on_avx2<Number>, rotate_on_avx2<Number>};
  return {add<8>, gate<8, Number>, rotate<8, Number>};
}

}  // namespace

template <class Number>
void Decoder<Number>::run(float* x, const Number* cosines, const Number* sines, AttentionPlan& plan, Number* key_pages,
                          Number* value_pages, const std::int64_t* slots, unsigned threads) const {
  const std::size_t rows = plan.rows(), numbers = heads.key_numbers, most = std::min(rows, kRowsOpened);
  const std::size_t query_size = heads.heads * numbers, key_size = heads.kv_heads * numbers;
  thread_local Scratch of_sums, of_numbers;
  float* const sums =
      of_sums.take(std::max(rows * std::max(query_size + key_size, hidden), most * (2 * inner + hidden)));
  const std::size_t widest = rows * std::max(hidden, query_size);
  auto* const normed =
      reinterpret_cast<Number*>(of_numbers.take(widest + std::max(rows * (query_size + 2 * key_size), most * inner)));
  Number* const q = normed + widest;
  Number* const k = q + rows * query_size;
  Number* const v = k + rows * key_size;

  rms_norm(x, before.weight, normed, rows, hidden, before.rule, threads);
  float* const key_sums = sums + rows * query_size;
  const std::array<Layer<Number>, 3> given{{{queries.weight, queries.packed, queries.bias, nullptr, query_size, sums},
                                            {keys.weight, keys.packed, keys.bias, nullptr, key_size, key_sums},
                                            {values.weight, values.packed, values.bias, v, key_size}}};
  multiply<Number>(normed, rows, hidden, given, threads);
  share_rows(rows, query_size + key_size, threads, [&](std::size_t begin, std::size_t end) {
    const std::size_t at = begin * numbers;
    const auto turned = [&](float* from, std::size_t heads_of_row, const NormWeight<Number>& norm, Number* to) {
      turn(from + at * heads_of_row, heads_of_row, norm, cosines + at, sines + at, to + at * heads_of_row, end - begin);
    };
    turned(sums, heads.heads, of_queries, q);
    turned(key_sums, heads.kv_heads, of_keys, k);
  });
  for (std::size_t i = 0; i < rows; ++i) {
    std::copy_n(k + i * key_size, key_size, key_pages + slots[i] * key_size);
    std::copy_n(v + i * key_size, key_size, value_pages + slots[i] * key_size);
  }
  plan.attend<Number>(q, {key_pages, value_pages, key_size, key_size}, heads, scores, normed, threads);
  const std::array<Layer<Number>, 1> attention{
      {{attended.weight, attended.packed, attended.bias, nullptr, hidden, sums}}};
  multiply<Number>(normed, rows, query_size, attention, threads);
  join(x, sums, normed, rows, threads);

  Number* const opened = q;
  float* const widened = sums + most * inner;
  float* const found = widened + most * inner;
  for (std::size_t i = 0; i < rows; i += most) {
    const std::size_t count = std::min(most, rows - i);
    const std::array<Layer<Number>, 2> wide{{{gate.weight, gate.packed, gate.bias, nullptr, inner, sums},
                                             {up.weight, up.packed, up.bias, nullptr, inner, widened}}};
    multiply<Number>(normed + i * hidden, count, hidden, wide, threads);
    open(sums, widened, opened, count, threads);
    const std::array<Layer<Number>, 1> narrow{{{down.weight, down.packed, down.bias, nullptr, hidden, found}}};
    multiply<Number>(opened, count, inner, narrow, threads);
    join(x + i * hidden, found, nullptr, count, threads);
  }
}

template <class Number>
void Decoder<Number>::turn(float* x, std::size_t count, const NormWeight<Number>& norm, const Number* cosines,
                           const Number* sines, Number* turned, std::size_t rows) const {
  const auto rotate = best_elements<Number>().rotate;
  const std::size_t numbers = heads.key_numbers, width = count * numbers;
  if (norm.weight) rms_norm(x, norm.weight, x, rows * count, numbers, norm.rule, 1);
  for (std::size_t row = 0; row < rows; ++row)
    rotate(x + row * width, turned + row * width, cosines + row * numbers, sines + row * numbers, count, numbers);
}

template <class Number>
void Decoder<Number>::join(float* x, const float* found, Number* normed, std::size_t rows, unsigned threads) const {
  const auto add = best_elements<Number>().add;
  share_rows(rows, hidden, threads, [&](std::size_t begin, std::size_t end) {
    const std::size_t at = begin * hidden;
    add(x + at, found + at, (end - begin) * hidden);
    if (normed) rms_norm(x + at, after.weight, normed + at, end - begin, hidden, after.rule, 1);
  });
}

template <class Number>
void Decoder<Number>::open(const float* given, const float* widened, Number* opened, std::size_t rows,
                           unsigned threads) const {
  const auto gate = best_elements<Number>().gate;
  share_rows(rows, inner, threads, [&](std::size_t begin, std::size_t end) {
    const std::size_t at = begin * inner;
    gate(given + at, widened + at, opened + at, (end - begin) * inner, activation);
  });
}

template struct Decoder<float>;
template struct Decoder<BFloat16>;

}  // namespace mainstem
