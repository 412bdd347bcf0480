#include "kernels/linear.h"

#include <algorithm>
#include <memory>

#include "kernels/functions.h"
#include "kernels/parallel.h"
#include "kernels/tiles.h"

namespace mainstem {

namespace {

constexpr std::size_t kPrefetch = 4096;  // bytes ahead: the hardware's prefetcher stops at the end of each page
constexpr std::size_t kAlone = 1 << 17;  // bytes of weights that one thread reads before others have begun
constexpr std::size_t kParts = 4;        // of a thread's work, so that none waits long for another

// The rows of x as float32, pair by pair.
class Widened {
 public:
  template <class Number>
  Widened(const Number* x, std::size_t rows, std::size_t inputs, std::size_t lanes, bool alternates)
      : count(rows), inputs(inputs), lines_(std::make_unique_for_overwrite<Line[]>(rows * inputs / kLine)) {
    const std::size_t step = alternates ? 2 : 1;  // in x, between neighbours in a vector
    const std::size_t second = alternates ? 1 : lanes;
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

// The rows of x as they are.
template <class Number>
struct AsGiven {
  AsGiven(const Number* x, std::size_t rows, std::size_t inputs, std::size_t, bool)
      : count(rows), inputs(inputs), x(x) {}

  const Number* operator[](std::size_t row) const { return x + row * inputs; }

  const std::size_t count, inputs;
  const Number* const x;
};

// How a row of a weight is read, what x is for it, and how many rows of both meet at a time: their sums are registers.

// A row of a weight as the numbers of a model.
template <class Number>
struct Plain {
  using Given = Widened;
  static constexpr int kOutputs = 2, kRows = 8;
  static constexpr bool kAlternates = sizeof(Number) == sizeof(BFloat16);  // its pairs are those of even and odd places

  static Plain of(const Layer<Number>& layer, std::size_t output, std::size_t inputs) {
    return {layer.weight + output * inputs};
  }
  template <int kLanes>
  MAINSTEM_INLINE Pair<kLanes> next(std::size_t i) const {
    return load_pair<kLanes>(numbers + i);
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const { __builtin_prefetch(numbers + i + kPrefetch / sizeof(Number)); }

  const Number* numbers;
};

// A row of bfloat16 that are multiplied in pairs, without being widened.
template <class Number>
struct Dots {
  using Given = AsGiven<Number>;
  static constexpr int kOutputs = 4, kRows = 6;
  static constexpr bool kAlternates = false;

  static Dots of(const Layer<Number>& layer, std::size_t output, std::size_t inputs) {
    return {layer.weight + output * inputs};
  }
  template <int kLanes>
  MAINSTEM_INLINE typename Lanes<kLanes>::Words next(std::size_t i) const {
    return load<typename Lanes<kLanes>::Words>(numbers + i);
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const { __builtin_prefetch(numbers + i + kPrefetch / sizeof(Number)); }

  const Number* numbers;
};

// A row of a weight in 4 bits a number.
template <class Number>
struct Packed {
  using Given = Widened;
  static constexpr int kOutputs = 2, kRows = 8;
  static constexpr bool kAlternates = true;

  static Packed of(const Layer<Number>& layer, std::size_t output, std::size_t inputs) {
    return {layer.packed.codes + output * inputs / kCodes, layer.packed.scales + output * inputs / kGroup};
  }
  template <int kLanes>
  MAINSTEM_INLINE Pair<kLanes> next(std::size_t i) const {
    const std::uint32_t* const group = codes + i / kGroup * (kGroup / kCodes);
    const std::uint32_t begin = i % kGroup;  // four bits for each two places
    const float scale = scales[i / kGroup];
    return {numbers<kLanes>(group, begin) * scale, numbers<kLanes>(group + 2, begin) * scale};
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const {
    __builtin_prefetch(codes + i / kCodes + kPrefetch / sizeof *codes);
  }

  const std::uint32_t* codes;
  const float* scales;

 private:
  static constexpr std::size_t kCodes = 8;  // of a word

  // Returns the codes of two words from a bit on, less 8: as the lowest bits of 2^23, they are a float32.
  template <int kLanes>
  static MAINSTEM_INLINE typename Lanes<kLanes>::Floats numbers(const std::uint32_t* words, std::uint32_t begin) {
    using Words = typename Lanes<kLanes>::Words;
    const auto both = typename Lanes<kLanes>::Quads{} + load<std::uint64_t>(words);
    const Words bits = (Words(numbered<kLanes>()) >> 1 << 2) + begin;
    const Words codes = ((load<Words>(&both) >> bits) & 0x0fu) | 0x4b000000u;
    return load<typename Lanes<kLanes>::Floats>(&codes) - (0x1p23f + 8);
  }
};

// Reads what meets the next numbers of a weight: a pair of widened ones, or pairs of bfloat16.
template <int kLanes>
MAINSTEM_INLINE Pair<kLanes> next_of(const float* x) {
  return load_pair<kLanes>(x);
}
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Words next_of(const BFloat16* x) {
  return load<typename Lanes<kLanes>::Words>(x);
}

// Adds products to the totals of kN rows of a weight.
template <int kLanes, int kN>
MAINSTEM_INLINE void add(typename Lanes<kLanes>::Floats* totals, const Pair<kLanes>* w, Pair<kLanes> x) {
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    totals[n] += w[n].first * x.first;
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    totals[n] += w[n].second * x.second;
}
template <int kLanes, int kN>
MAINSTEM_INLINE void add(typename Lanes<kLanes>::Floats* totals, const typename Lanes<kLanes>::Words* w,
                         typename Lanes<kLanes>::Words x) {
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    totals[n] = dots<kLanes>(totals[n], w[n], x);
}

// Computes kM rows of x times kN rows of the weight.
template <int kLanes, int kN, int kM, bool kFirst, template <class> class Form, class Number>
MAINSTEM_INLINE void tile(const typename Form<Number>::Given& x, std::size_t row, const Layer<Number>& layer,
                          std::size_t output) {
  typename Lanes<kLanes>::Floats total[kM][kN] = {};
  Form<Number> weight[kN];
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    weight[n] = Form<Number>::of(layer, output + n, x.inputs);
  const auto* const rows = x[row];
  for (std::size_t i = 0; i < x.inputs; i += 2 * kLanes) {
    decltype(weight[0].template next<kLanes>(i)) w[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      w[n] = weight[n].template next<kLanes>(i);
      if (kFirst) weight[n].prefetch(i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      add<kLanes, kN>(total[m], w, next_of<kLanes>(rows + m * x.inputs + i));
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
template <int kLanes, int kN, int kM, bool kFirst, template <class> class Form, class Number>
MAINSTEM_INLINE void last_rows(const typename Form<Number>::Given& x, std::size_t row, const Layer<Number>& layer,
                               std::size_t output) {
  if constexpr (kM > 0) {
    if (x.count - row == kM)
      tile<kLanes, kN, kM, kFirst, Form>(x, row, layer, output);
    else
      last_rows<kLanes, kN, kM - 1, kFirst, Form>(x, row, layer, output);
  }
}

// Computes all rows of x times kN rows of the weight, which the first tile reads from memory.
template <int kLanes, int kN, template <class> class Form, class Number>
MAINSTEM_INLINE void all_rows(const typename Form<Number>::Given& x, const Layer<Number>& layer, std::size_t output) {
  constexpr int kRows = Form<Number>::kRows;
  if (x.count < kRows) return last_rows<kLanes, kN, kRows - 1, true, Form>(x, 0, layer, output);
  tile<kLanes, kN, kRows, true, Form>(x, 0, layer, output);
  std::size_t row = kRows;
  for (; row + kRows <= x.count; row += kRows)
    tile<kLanes, kN, kRows, false, Form>(x, row, layer, output);
  last_rows<kLanes, kN, kRows - 1, false, Form>(x, row, layer, output);
}

template <int kLanes, template <class> class Form, class Number>
MAINSTEM_INLINE void some_outputs(const typename Form<Number>::Given& x, const Layer<Number>& layer, std::size_t begin,
                                  std::size_t end) {
  constexpr int kOutputs = Form<Number>::kOutputs;
  std::size_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs)
    all_rows<kLanes, kOutputs, Form>(x, layer, output);
  for (; output < end; ++output)
    all_rows<kLanes, 1, Form>(x, layer, output);
}

template <template <class> class Form, class Number>
MAINSTEM_AVX512 void on_avx512(const typename Form<Number>::Given& x, const Layer<Number>& layer, std::size_t begin,
                               std::size_t end) {
  some_outputs<16, Form>(x, layer, begin, end);
}

template <template <class> class Form, class Number>
MAINSTEM_AVX2 void on_avx2(const typename Form<Number>::Given& x, const Layer<Number>& layer, std::size_t begin,
                           std::size_t end) {
  some_outputs<8, Form>(x, layer, begin, end);
}

// Calls run(layer, begin, end) for parts of the outputs of layers, of which `step` are computed at a time.
template <class Number, class Run>
void share_outputs(std::span<const Layer<Number>> layers, std::size_t step, std::size_t bytes, unsigned threads,
                   const Run& run) {
  std::size_t outputs = 0;
  for (const auto& layer : layers)
    outputs += layer.outputs;
  if (outputs * bytes <= kAlone) threads = 1;
  const std::size_t part = outputs / (threads * kParts) / step * step + step;
  share_out(outputs, part, threads, [&](std::size_t begin, std::size_t end) {
    std::size_t before = 0;  // outputs of the layers before
    for (const auto& layer : layers) {
      const std::size_t from = std::max(begin, before), to = std::min(end, before + layer.outputs);
      if (from < to) run(layer, from - before, to - before);
      before += layer.outputs;
    }
  });
}

template <template <class> class Form, class Number>
void multiply_as(const Number* given, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
                 std::size_t bytes, unsigned threads) {
  const bool wide = best_isa() == Isa::kAvx512;
  const auto run = wide ? on_avx512<Form, Number> : on_avx2<Form, Number>;
  const typename Form<Number>::Given x(given, rows, inputs, wide ? 16 : 8, Form<Number>::kAlternates);
  share_outputs(layers, Form<Number>::kOutputs, bytes, threads,
                [&](const auto& layer, std::size_t begin, std::size_t end) { run(x, layer, begin, end); });
}

#ifdef __x86_64__

// Writes 16 outputs of the rows of a group.
MAINSTEM_AVX512 void write_tile(const float (&sums)[kTileRows][kTileRows], const Layer<BFloat16>& layer,
                                std::size_t output, std::size_t row, std::size_t rows) {
  float bias[kTileRows] = {};
  for (std::size_t n = 0; layer.bias && n < kTileRows; ++n)
    bias[n] = widen(layer.bias[output + n]);
  for (std::size_t m = 0; m < rows; ++m) {
    float numbers[kTileRows];
    for (std::size_t n = 0; n < kTileRows; ++n)
      numbers[n] = sums[n][m] + bias[n];
    store<16>(layer.out + (row + m) * layer.outputs + output, load_floats<16>(numbers));
  }
}

// Computes outputs [begin, end) of a layer, those by tiles that fill one.
void outputs_by_tiles(const TiledRows& x, const Layer<BFloat16>& layer, std::size_t begin, std::size_t end) {
  const std::size_t whole = begin + (end - begin) / kTileRows * kTileRows;
  {
    const Tiles tiles;
    TileSums found;
    for (std::size_t output = begin; output < whole; output += kTileRows) {
      const BFloat16* const weight = layer.weight + output * x.inputs;
      const BFloat16* const next = output + 2 * kTileRows <= end ? weight + kTileRows * x.inputs : weight;
      for (std::size_t group = 0; group < x.groups(); group += 2) {
        const std::size_t row = group * kTileRows, left = x.count - row;
        if (left > kTileRows)
          multiply_tiles<2>(weight, next, x, group, found);
        else
          multiply_tiles<1>(weight, next, x, group, found);
        write_tile(found.sums[0], layer, output, row, std::min(left, kTileRows));
        if (left > kTileRows)
          write_tile(found.sums[1], layer, output, row + kTileRows, std::min(left - kTileRows, kTileRows));
      }
    }
  }
  if (whole == end) return;
  const AsGiven<BFloat16> as_given(x.x, x.count, x.inputs, 16, false);
  on_avx512<Dots, BFloat16>(as_given, layer, whole, end);
}

#endif

void multiply_by_tiles(const BFloat16* given, std::size_t rows, std::size_t inputs,
                       std::span<const Layer<BFloat16>> layers, unsigned threads) {
#ifdef __x86_64__
  const TiledRows x(given, rows, inputs);
  share_outputs(layers, kTileRows, inputs * sizeof(BFloat16), threads,
                [&](const auto& layer, std::size_t begin, std::size_t end) { outputs_by_tiles(x, layer, begin, end); });
#endif
}

}  // namespace

template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads) {
  if (rows <= kInt4Rows && std::ranges::all_of(layers, [](const auto& layer) { return layer.packed.codes; }))
    return multiply_as<Packed>(x, rows, inputs, layers, inputs / 2, threads);
  if constexpr (sizeof(Number) == sizeof(BFloat16)) {
    if (has_tiles()) return multiply_by_tiles(x, rows, inputs, layers, threads);
    if (has_dots()) return multiply_as<Dots>(x, rows, inputs, layers, inputs * sizeof(Number), threads);
  }
  multiply_as<Plain>(x, rows, inputs, layers, inputs * sizeof(Number), threads);
}

template void multiply(const float*, std::size_t, std::size_t, std::span<const Layer<float>>, unsigned);
template void multiply(const BFloat16*, std::size_t, std::size_t, std::span<const Layer<BFloat16>>, unsigned);

}  // namespace mainstem
