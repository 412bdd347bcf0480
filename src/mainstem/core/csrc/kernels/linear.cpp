#include "kernels/linear.h"

#include <algorithm>
#include <memory>

#include "kernels/parallel.h"

namespace mainstem {

namespace {

constexpr int kOutputs = 2;              // rows of the weight at a time
constexpr int kRows = 8;                 // rows of x at a time
constexpr std::size_t kPrefetch = 4096;  // bytes ahead: the hardware's prefetcher stops at the end of each page
constexpr std::size_t kAlone = 1 << 17;  // bytes of weights that one thread reads before others have begun
constexpr std::size_t kParts = 4;        // of a thread's work, so that none waits long for another

// The rows of x as float32, pair by pair.
class Rows {
 public:
  template <class Number>
  Rows(const Number* x, std::size_t rows, std::size_t inputs, std::size_t lanes)
      : count(rows), inputs(inputs), lines_(std::make_unique_for_overwrite<Line[]>(rows * inputs / kLine)) {
    const std::size_t step = sizeof(Number) == sizeof(BFloat16) ? 2 : 1;  // in x, between neighbours in a vector
    const std::size_t second = sizeof(Number) == sizeof(BFloat16) ? 1 : lanes;
    float* to = lines_[0].floats;
    for (std::size_t at = 0; at < rows * inputs; at += 2 * lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        to[at + lane] = widen(x[at + step * lane]);
        to[at + lanes + lane] = widen(x[at + step * lane + second]);
      }
  }

  const float* operator[](std::size_t row) const { return lines_[0].floats + row * inputs; }

  const std::size_t count, inputs;

 private:
  static constexpr std::size_t kLine = 16;
  struct alignas(64) Line {
    float floats[kLine];
  };
  std::unique_ptr<Line[]> lines_;
};

// Computes kM rows of x times kN rows of the weight.
template <int kLanes, int kN, int kM, bool kFirst, class Number>
MAINSTEM_INLINE void tile(const Rows& x, std::size_t row, const Layer<Number>& layer, std::size_t output) {
  typename Lanes<kLanes>::Floats total[kM][kN] = {};
  const Number* weight = layer.weight + output * x.inputs;
  const float* rows = x[row];
  for (std::size_t i = 0; i < x.inputs; i += 2 * kLanes) {
    Pair<kLanes> w[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      w[n] = load_pair<kLanes>(weight + n * x.inputs + i);
      if (kFirst) __builtin_prefetch(weight + n * x.inputs + i + kPrefetch / sizeof(Number));
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const auto given = load_pair<kLanes>(rows + m * x.inputs + i);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n)
        total[m][n] += w[n].first * given.first;
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n)
        total[m][n] += w[n].second * given.second;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m) {
    Floats4 folded[4] = {}, bias = {};
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      folded[n] = fold<kLanes>(total[m][n]);
      if (layer.bias) bias[n] = widen(layer.bias[output + n]);
    }
    store<4, kN>(layer.out + (row + m) * layer.outputs + output,
                 sums(folded[0], folded[1], folded[2], folded[3]) + bias);
  }
}

// Computes the last rows of x, fewer than kM + 1.
template <int kLanes, int kN, int kM, bool kFirst, class Number>
MAINSTEM_INLINE void last_rows(const Rows& x, std::size_t row, const Layer<Number>& layer, std::size_t output) {
  if constexpr (kM > 0) {
    if (x.count - row == kM)
      tile<kLanes, kN, kM, kFirst>(x, row, layer, output);
    else
      last_rows<kLanes, kN, kM - 1, kFirst>(x, row, layer, output);
  }
}

// Computes all rows of x times kN rows of the weight, which the first tile reads from memory.
template <int kLanes, int kN, class Number>
MAINSTEM_INLINE void all_rows(const Rows& x, const Layer<Number>& layer, std::size_t output) {
  if (x.count < kRows) return last_rows<kLanes, kN, kRows - 1, true>(x, 0, layer, output);
  tile<kLanes, kN, kRows, true>(x, 0, layer, output);
  std::size_t row = kRows;
  for (; row + kRows <= x.count; row += kRows)
    tile<kLanes, kN, kRows, false>(x, row, layer, output);
  last_rows<kLanes, kN, kRows - 1, false>(x, row, layer, output);
}

template <int kLanes, class Number>
MAINSTEM_INLINE void some_outputs(const Rows& x, const Layer<Number>& layer, std::size_t begin, std::size_t end) {
  std::size_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs)
    all_rows<kLanes, kOutputs>(x, layer, output);
  for (; output < end; ++output)
    all_rows<kLanes, 1>(x, layer, output);
}

template <class Number>
MAINSTEM_AVX512 void on_avx512(const Rows& x, const Layer<Number>& layer, std::size_t begin, std::size_t end) {
  some_outputs<16>(x, layer, begin, end);
}

template <class Number>
MAINSTEM_AVX2 void on_avx2(const Rows& x, const Layer<Number>& layer, std::size_t begin, std::size_t end) {
  some_outputs<8>(x, layer, begin, end);
}

}  // namespace

template <class Number>
void multiply(const Number* given, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads) {
  const bool wide = best_isa() == Isa::kAvx512;
  const auto run = wide ? on_avx512<Number> : on_avx2<Number>;
  const Rows x(given, rows, inputs, wide ? 16 : 8);
  std::size_t outputs = 0;
  for (const auto& layer : layers)
    outputs += layer.outputs;
  if (outputs * inputs * sizeof(Number) <= kAlone) threads = 1;
  const std::size_t part = outputs / (threads * kParts) / kOutputs * kOutputs + kOutputs;
  share_out(outputs, part, threads, [&](std::size_t begin, std::size_t end) {
    std::size_t before = 0;  // outputs of the layers before
    for (const auto& layer : layers) {
      const std::size_t from = std::max(begin, before), to = std::min(end, before + layer.outputs);
      if (from < to) run(x, layer, from - before, to - before);
      before += layer.outputs;
    }
  });
}

template void multiply(const float*, std::size_t, std::size_t, std::span<const Layer<float>>, unsigned);
template void multiply(const BFloat16*, std::size_t, std::size_t, std::span<const Layer<BFloat16>>, unsigned);

}  // namespace mainstem
