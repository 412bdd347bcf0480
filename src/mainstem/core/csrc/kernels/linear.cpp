#include "kernels/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/functions.h"
#include "kernels/parallel.h"
#include "kernels/scratch.h"
#include "kernels/tiles.h"

namespace mainstem {

namespace {

constexpr std::size_t kPrefetch = 4096;  // bytes ahead: the hardware's prefetcher stops at the end of each page
constexpr std::size_t kAlone = 1 << 17;  // bytes of weights that one thread reads before others have begun
constexpr std::size_t kFirstCache = 1 << 14, kSecondCache = 1 << 17;  // bytes of a weight and of x that stay in each
constexpr std::size_t kStepOfShares = 4;                              // outputs
constexpr std::size_t kRowsAtOnce = 1536;
constexpr std::size_t kLine = 64;                     // bytes of a line of the caches
constexpr std::size_t kTileBlock = 2 * kTileRows;     // rows and outputs whose sums are in tiles together
constexpr std::size_t kTileOutputs = 8 * kTileBlock;  // outputs whose weights stay in the second cache
constexpr std::size_t kPackedRows = 7;  // up to which the codes of a weight are read; the weight has the same numbers
constexpr std::size_t kParts = 4;       // of a thread's work, so that none waits long for another

// How a row of a weight is read, what x is for it, and how many rows of both meet at a time: their sums are registers.
// A weight's next numbers and those of x are of one type, which says how they are multiplied: `Floats`, a `Pair` of
// them, or `Words`, pairs of bfloat16.

struct Shape {
  int step;           // numbers of a row that meet at a time
  int outputs, rows;  // of a tile
};

// Rows of bfloat16 that are multiplied in pairs, without being widened.
struct Dots {
  using Number = BFloat16;
  using Given = BFloat16;                                     // the numbers of x
  static constexpr bool kAlternates = false, kIsWide = true;  // it needs instructions of AVX-512
  template <int kLanes>
  static constexpr Shape kShape = {2 * kLanes, 4, 6};

  static Dots of(const Layer<BFloat16>& layer, std::size_t output, std::size_t inputs) {
    return {layer.weight + output * inputs};
  }
  template <int kLanes>
  MAINSTEM_INLINE typename Lanes<kLanes>::Words next(std::size_t i) const {
    return load<typename Lanes<kLanes>::Words>(numbers + i);
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const { __builtin_prefetch(numbers + i + kPrefetch / sizeof *numbers); }

  // Returns what `next` would, of numbers at even and at odd places.
  template <int kLanes>
  static MAINSTEM_INLINE typename Lanes<kLanes>::Words joined(Pair<kLanes> pair) {
    using Words = typename Lanes<kLanes>::Words;
    return (load<Words>(&pair.first) >> 16) | (load<Words>(&pair.second) & 0xffff0000u);
  }

  const BFloat16* numbers;
};

// Rows of numbers that are multiplied as float32.
template <class Kept>
struct Plain {
  using Number = Kept;
  using Given = float;
  static constexpr bool kIsFloat = sizeof(Number) == sizeof(float);
  static constexpr bool kIsWide = false;
  static constexpr bool kAlternates = !kIsFloat;  // its pairs are those of even and odd places
  template <int kLanes>
  static constexpr Shape kShape = {kIsFloat ? kLanes : 2 * kLanes, kIsFloat&& kLanes == 16 ? 4 : 2,
                                   kIsFloat      ? 6
                                   : kLanes < 16 ? 5
                                                 : 8};

  static Plain of(const Layer<Number>& layer, std::size_t output, std::size_t inputs) {
    return {layer.weight + output * inputs};
  }
  template <int kLanes>
  MAINSTEM_INLINE auto next(std::size_t i) const {
    if constexpr (kIsFloat)
      return load_floats<kLanes>(numbers + i);
    else
      return load_pair<kLanes>(numbers + i);
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const { __builtin_prefetch(numbers + i + kPrefetch / sizeof *numbers); }

  // Returns the pair of two of `next`, of numbers at even and at odd places.
  template <int kLanes>
  static MAINSTEM_INLINE Pair<kLanes> joined(Pair<kLanes> pair) {
    return kIsFloat ? zipped<kLanes>(pair, std::make_index_sequence<kLanes>{}) : pair;
  }

  const Number* numbers;
};

// Returns the nearest bfloat16 of each, the even one of two, as a float32. A number plus one whose last place is its
// own eighth bit is rounded there.
template <int kLanes>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats nearest_bfloat16(typename Lanes<kLanes>::Floats numbers) {
  using Floats = typename Lanes<kLanes>::Floats;
  const auto powers = load<typename Lanes<kLanes>::Words>(&numbers) & 0xff800000u;
  const Floats large = load<Floats>(&powers) * 0x1.8p16f;
  return (numbers + large) - large;
}

// Rows of codes, which become what `Form` would read.
template <class Form, unsigned kBits>
struct Packed {
  using Number = typename Form::Number;
  using Given = typename Form::Given;
  static constexpr bool kAlternates = Form::kAlternates, kIsWide = Form::kIsWide;
  template <int kLanes>
  static constexpr Shape kShape = {2 * kLanes, 2, kLanes < 16 ? 4 : 8};

  static Packed of(const Layer<Number>& layer, std::size_t output, std::size_t inputs) {
    const std::size_t groups = output * inputs / kGroup;
    return {layer.packed.codes + groups * kBits, layer.packed.scales + groups * kScales};
  }
  template <int kLanes>
  MAINSTEM_INLINE auto next(std::size_t i) const {
    const std::uint32_t* const words = codes + i / kGroup * kBits;
    const float* const given = scales + i / kGroup * kScales;
    const Range range{given[0], kBits == 4 ? given[kScales - 1] : -128 * given[0]};
    if constexpr (kBits == 4 && std::is_same_v<Form, Dots>) {
      return looked_up(words, range);
    } else {
      using Words = typename Lanes<kLanes>::Words;
      constexpr std::size_t kOdd = kBits == 4 ? 0 : 4;  // words on, and else bits
      const Words shifts =
          (Words(numbered<kLanes>()) >> 2) * kBits + static_cast<std::uint32_t>(i % kGroup / 8 * kBits);
      return Form::template joined<kLanes>(
          {numbers<kLanes>(repeated<kLanes>(words) >> shifts, range),
           numbers<kLanes>(repeated<kLanes>(words + kOdd) >> (shifts + (kOdd ? 0 : 16)), range)});
    }
  }
  MAINSTEM_INLINE void prefetch(std::size_t i) const {
    __builtin_prefetch(codes + i / kGroup * kBits + kPrefetch / sizeof *codes);
  }

  const std::uint32_t* codes;
  const float* scales;

 private:
  static constexpr std::size_t kScales = kBits == 4 ? 2 : 1;  // of a group
  struct Range {
    float scale, minimum;
  };

  // Returns four words, again and again.
  template <int kLanes>
  static MAINSTEM_INLINE typename Lanes<kLanes>::Words repeated(const std::uint32_t* words) {
    using Four = Lanes<4>::Words;
    if constexpr (kLanes == 8) {
      const auto four = load<Four>(words);
      return __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
    } else {
      Lanes<16>::Words all = {};
#ifdef __x86_64__
      __asm__("vbroadcasti32x4 %1, %0"
              : "=v"(all)
              : "m"(*reinterpret_cast<const Four*>(words)));  // GCC 12 makes it of several instructions
#endif
      return all;
    }
  }

  // Returns the numbers of codes.
  template <int kLanes>
  static MAINSTEM_INLINE typename Lanes<kLanes>::Floats of_codes(typename Lanes<kLanes>::Signed codes, Range range) {
    using Floats = typename Lanes<kLanes>::Floats;
    const Floats found = __builtin_convertvector(codes, Floats) * range.scale + range.minimum;
    if constexpr (sizeof(Number) == sizeof(float)) return found;
    return nearest_bfloat16<kLanes>(found);
  }

  // Returns the numbers of the codes in the lowest bits of words. Sixteen lanes have room for those of all codes.
  template <int kLanes>
  static MAINSTEM_INLINE typename Lanes<kLanes>::Floats numbers(typename Lanes<kLanes>::Words words, Range range) {
    using Signed = typename Lanes<kLanes>::Signed;
    if constexpr (kBits == 4 && kLanes == 16)
      return __builtin_shuffle(of_codes<16>(numbered<16>(), range), Signed(words));
    else
      return of_codes<kLanes>(Signed(words & ((1u << kBits) - 1)), range);
  }

  // Returns 32 bfloat16, of codes of 4 bits: a vector has room for all their numbers, twice.
  static MAINSTEM_INLINE Lanes<16>::Words looked_up(const std::uint32_t* words, Range range) {
    using Halves = Lanes<16>::Pairs;
    static constexpr std::uint16_t kShifts[] = {0, 0, 0, 0, 0, 0, 0, 0, 4,  4,  4,  4,  4,  4,  4,  4,
                                                8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12};
    const auto all = of_codes<16>(numbered<16>(), range);
    const auto halves = load<Halves>(&all);
    const Halves table =
        __builtin_shufflevector(halves, halves, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,  //
                                1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const auto four = repeated<16>(words);
    const Halves places = load<Halves>(&four) >> load<Halves>(kShifts);
    Lanes<16>::Words found = {};
#ifdef __x86_64__
    __asm__("vpermw %1, %2, %0"
            : "=v"(found)
            : "v"(table), "v"(places));  // GCC 12 chooses from two tables, in three steps
#endif
    return found;
  }
};

// The rows of x as a form wants them, padded with zeros to whole steps.
template <class Form>
struct Rows {
  const typename Form::Given* operator[](std::size_t row) const { return numbers + row * inputs; }

  const typename Form::Given* numbers;
  std::size_t count, inputs;
};

// Reads of x what meets the next numbers of a weight.
template <int kLanes>
MAINSTEM_INLINE void read(const float* x, typename Lanes<kLanes>::Floats& next) {
  next = load_floats<kLanes>(x);
}
template <int kLanes>
MAINSTEM_INLINE void read(const float* x, Pair<kLanes>& next) {
  next = load_pair<kLanes>(x);
}
template <int kLanes>
MAINSTEM_INLINE void read(const BFloat16* x, typename Lanes<kLanes>::Words& next) {
  next = load<typename Lanes<kLanes>::Words>(x);
}

// Adds products to the totals of kN rows of a weight.
template <int kLanes, int kN>
MAINSTEM_INLINE void add(typename Lanes<kLanes>::Floats* totals, const typename Lanes<kLanes>::Floats* w,
                         typename Lanes<kLanes>::Floats x) {
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    totals[n] += w[n] * x;
}
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
template <int kLanes, int kN, int kM, bool kFirst, class Form>
MAINSTEM_INLINE void tile(const Rows<Form>& x, std::size_t row, const Layer<typename Form::Number>& layer,
                          std::size_t output) {
  constexpr std::size_t kStep = Form::template kShape<kLanes>.step;
  using Next = decltype(std::declval<Form>().template next<kLanes>(0));
  typename Lanes<kLanes>::Floats total[kM][kN] = {};
  Form weight[kN];
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n)
    weight[n] = Form::of(layer, output + n, x.inputs);
  const auto* const rows = x[row];
  for (std::size_t i = 0; i < x.inputs; i += kStep) {
    Next w[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      w[n] = weight[n].template next<kLanes>(i);
      if (kFirst) weight[n].prefetch(i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      Next next;
      read<kLanes>(rows + m * x.inputs + i, next);
      add<kLanes, kN>(total[m], w, next);
    }
  }
  Floats4 bias = {};
  if (layer.bias)
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n)
      bias[n] = widen(layer.bias[output + n]);
  layer.into(row * layer.outputs + output, [&](auto* out) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m)
      store<4, kN>(out + m * layer.outputs, totals_of<kLanes, kN>(total[m]) + bias);
  });
}

// Computes the last rows of x, fewer than kM + 1.
template <int kLanes, int kN, int kM, bool kFirst, class Form>
MAINSTEM_INLINE void last_rows(const Rows<Form>& x, std::size_t row, const Layer<typename Form::Number>& layer,
                               std::size_t output, std::size_t left) {
  if constexpr (kM > 0) {
    if (left == kM)
      tile<kLanes, kN, kM, kFirst>(x, row, layer, output);
    else
      last_rows<kLanes, kN, kM - 1, kFirst>(x, row, layer, output, left);
  }
}

// Computes some rows of x times kN rows of the weight. `kFirst`: they come from memory.
template <int kLanes, int kN, bool kFirst, class Form>
MAINSTEM_INLINE void tiles_of(const Rows<Form>& x, std::size_t row, std::size_t rows,
                              const Layer<typename Form::Number>& layer, std::size_t begin, std::size_t end) {
  constexpr int kRows = Form::template kShape<kLanes>.rows;
  for (std::size_t output = begin; output < end; output += kN)
    if (rows == kRows)
      tile<kLanes, kN, kRows, kFirst>(x, row, layer, output);
    else
      last_rows<kLanes, kN, kRows - 1, kFirst>(x, row, layer, output, rows);
}

// Computes rows of x times outputs [begin, end), of which kN at a time. A block of the weight stays in the first cache
// while rows pass by, and a block of rows in the second one while the weight does.
template <int kLanes, int kN, class Form>
MAINSTEM_INLINE void blocks(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin,
                            std::size_t end) {
  constexpr std::size_t kRows = Form::template kShape<kLanes>.rows;
  const std::size_t row_bytes = x.inputs * sizeof(typename Form::Given);
  const std::size_t outputs = std::max<std::size_t>(kFirstCache / row_bytes / kN, 1) * kN;
  const std::size_t many = std::max<std::size_t>(kSecondCache / row_bytes / kRows, 1) * kRows;
  for (std::size_t first = 0; first < x.count; first += many) {
    const std::size_t last = std::min(first + many, x.count);
    for (std::size_t output = begin; output < end; output += outputs) {
      const std::size_t until = std::min(output + outputs, end);
      tiles_of<kLanes, kN, true>(x, first, std::min(kRows, last - first), layer, output, until);
      for (std::size_t row = first + kRows; row < last; row += kRows)
        tiles_of<kLanes, kN, false>(x, row, std::min(kRows, last - row), layer, output, until);
    }
  }
}

template <int kLanes, class Form>
MAINSTEM_INLINE void some_outputs(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin,
                                  std::size_t end) {
  constexpr std::size_t kOutputs = Form::template kShape<kLanes>.outputs;
  const std::size_t whole = end - (end - begin) % kOutputs;
  blocks<kLanes, kOutputs>(x, layer, begin, whole);
  blocks<kLanes, 1>(x, layer, whole, end);
}

template <class Form>
MAINSTEM_AVX512 void on_avx512(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin,
                               std::size_t end) {
  some_outputs<16>(x, layer, begin, end);
}

template <class Form>
MAINSTEM_AVX2 void on_avx2(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin,
                           std::size_t end) {
  some_outputs<8>(x, layer, begin, end);
}

template <class Form>
void on_any(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin, std::size_t end) {
  some_outputs<8>(x, layer, begin, end);
}

// Returns the function that computes some outputs, and how many lanes its vectors have.
template <class Form>
auto best_kernel() {
  const auto kernel = [](auto run, std::size_t lanes) { return std::pair{run, lanes}; };
  if constexpr (!Form::kIsWide) {
    if (best_isa() == Isa::kPlain) return kernel(on_any<Form>, 8);
    if (best_isa() == Isa::kAvx2) return kernel(on_avx2<Form>, 8);
  }
  return kernel(on_avx512<Form>, 16);
}

// Returns rows of x as a form reads them, in `memory` if they are not so already.
template <class Form>
Rows<Form> prepared(const typename Form::Number* x, std::size_t rows, std::size_t inputs, std::size_t lanes,
                    Scratch& memory, unsigned threads) {
  using Given = typename Form::Given;
  const std::size_t step = 2 * lanes, stride = (inputs + step - 1) / step * step;
  if constexpr (!Form::kAlternates)
    if (stride == inputs) return {x, rows, inputs};
  auto* const numbers = reinterpret_cast<Given*>(memory.take(rows * stride));
  share_rows(rows, stride, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      Given* const to = numbers + row * stride;
      std::fill(to + inputs / step * step, to + stride, 0);
      for (std::size_t i = 0; i < inputs; ++i)
        if constexpr (Form::kAlternates)
          to[i / step * step + i % 2 * lanes + i % step / 2] = widen(x[row * inputs + i]);
        else
          to[i] = x[row * inputs + i];
    }
  });
  return {numbers, rows, stride};
}

// Calls run(layer, begin, end) for parts of the outputs of layers.
template <class Number, class Run>
void share_outputs(std::span<const Layer<Number>> layers, std::size_t step, std::size_t rows, std::size_t bytes,
                   unsigned threads, const Run& run) {
  std::size_t outputs = 0;
  for (const auto& layer : layers)
    outputs += layer.outputs;
  if (outputs * bytes * ((rows + 7) / 8) <= kAlone) threads = 1;
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

// Calls run(layer, begin, end) for outputs [begin, end) of a layer, or of padded copies of them.
template <class Number, class Run>
void with_whole_rows(const Layer<Number>& layer, std::size_t begin, std::size_t end, std::size_t given_inputs,
                     std::size_t inputs, const Run& run) {
  if (given_inputs == inputs) return run(layer, begin, end);
  constexpr std::size_t kCopied = 64;  // outputs
  thread_local Scratch memory;
  auto* const copy = reinterpret_cast<Number*>(memory.take(kCopied * inputs));
  Layer<Number> some{copy, {}, layer.bias ? layer.bias + begin : nullptr, layer.out, layer.outputs, layer.sums};
  some.skip(begin);
  while (begin < end) {
    const std::size_t count = std::min(kCopied, end - begin);
    std::fill_n(copy, count * inputs, 0);
    for (std::size_t n = 0; n < count; ++n)
      std::copy_n(layer.weight + (begin + n) * given_inputs, given_inputs, copy + n * inputs);
    run(some, 0, count);
    begin += count;
    some.skip(count);
    if (some.bias) some.bias += count;
  }
}

// Computes outputs [begin, end) of a layer from what is read as `Read`, for which x is as for a `Form`.
template <class Read, class Form>
void run_as(const Rows<Form>& x, const Layer<typename Form::Number>& layer, std::size_t begin, std::size_t end) {
  best_kernel<Read>().first({x.numbers, x.count, x.inputs}, layer, begin, end);
}

template <class Form>
void multiply_as(const typename Form::Number* given, std::size_t rows, std::size_t inputs,
                 std::span<const Layer<typename Form::Number>> layers, bool packed, unsigned threads) {
  using Part = Layer<typename Form::Number>;
  thread_local Scratch memory;
  const auto x = prepared<Form>(given, rows, inputs, best_kernel<Form>().second, memory, threads);
  const auto run = [&](const Part& layer, std::size_t begin, std::size_t end) {
    if (!packed)
      run_as<Form>(x, layer, begin, end);
    else if (layer.packed.bits == 4)
      run_as<Packed<Form, 4>>(x, layer, begin, end);
    else
      run_as<Packed<Form, 8>>(x, layer, begin, end);
  };
  const std::size_t bytes = packed ? inputs / 2 : inputs * sizeof *given;
  share_outputs(layers, kStepOfShares, rows, bytes, threads,
                [&](const Part& layer, std::size_t begin, std::size_t end) {
                  with_whole_rows(layer, begin, end, inputs, x.inputs, run);
                });
}

#ifdef __x86_64__

// Writes `count` outputs of some rows: sums[output][row].
MAINSTEM_AVX512 void write_turned(const float (&sums)[kTileRows][kTileRows], const Layer<BFloat16>& layer,
                                  std::size_t output, std::size_t count, std::size_t row, std::size_t rows) {
  for (std::size_t m = 0; m < rows; ++m) {
    float numbers[kTileRows] = {};
    for (std::size_t n = 0; n < count; ++n)
      numbers[n] = layer.bias ? sums[n][m] + widen(layer.bias[output + n]) : sums[n][m];
    layer.into((row + m) * layer.outputs + output, [&](auto* out) __attribute__((always_inline)) {
      store_first<16>(out, load_floats<16>(numbers), count);
    });
  }
}

// Up to 32 rows of up to 32 outputs.
struct TileBlock {
  std::size_t row, rows, output, outputs;
};

// Writes one row of a block: sums[row][output].
MAINSTEM_INLINE void write_row(const TileSums& found, const Layer<BFloat16>& layer, const TileBlock& block,
                               std::size_t row) {
  for (std::size_t n = 0; n < block.outputs; n += kTileRows) {
    auto sums = load_floats<16>(found.sums[row / kTileRows][n / kTileRows][row % kTileRows]);
    const std::size_t count = block.outputs - n;
    if (layer.bias) sums += load_first<16>(layer.bias + block.output + n, count);
    layer.into((block.row + row) * layer.outputs + block.output + n,
               [&](auto* out) __attribute__((always_inline)) { store_first<16>(out, sums, count); });
  }
}

// Writes the numbers of an output's codes to [inputs].
template <unsigned kBits>
MAINSTEM_AVX512 void unpack(const Layer<BFloat16>& layer, std::size_t output, std::size_t inputs, BFloat16* to) {
  const auto codes = Packed<Dots, kBits>::of(layer, output, inputs);
  for (std::size_t i = 0; i < inputs; i += kGroup) {
    const auto words = codes.template next<16>(i);
    std::memcpy(to + i, &words, sizeof words);
    codes.prefetch(i);
  }
}

// Computes outputs [begin, end) of a layer for few rows. Tiles that the weight does not fill, or that are codes, are
// filled first: so an output is computed in one way wherever a share ends.
void outputs_of_few_rows(const TiledRows& x, std::size_t rows, const Layer<BFloat16>& layer, std::size_t inputs,
                         bool packed, std::size_t begin, std::size_t end) {
  thread_local Scratch memory;
  const Tiles tiles;
  TileSums found;
  const std::size_t row_bytes = x.inputs() * sizeof(BFloat16);
  for (std::size_t output = begin; output < end; output += kTileRows) {
    const std::size_t count = std::min(kTileRows, end - output);
    const BFloat16* weight = layer.weight + output * inputs;
    const bool fills = count == kTileRows && inputs == x.inputs();
    if (packed || !fills) {
      auto* const copy = reinterpret_cast<BFloat16*>(memory.take(kTileRows * x.inputs()));
      if (!fills) std::fill_n(copy, kTileRows * x.inputs(), 0);
      for (std::size_t n = 0; n < count; ++n)
        if (packed)
          (layer.packed.bits == 4 ? unpack<4> : unpack<8>)(layer, output + n, inputs, copy + n * x.inputs());
        else
          std::copy_n(weight + n * inputs, inputs, copy + n * x.inputs());
      weight = copy;
    }
    const auto* next =
        reinterpret_cast<const char*>(weight) + (output + 2 * kTileRows <= end ? kTileRows * row_bytes : 0);
    const FirstFactor first{weight, row_bytes, kTileNumbers * sizeof(BFloat16)};
    const auto fetch = [&] {  // in the order in which they lie
      for (std::size_t n = 0; n < kTileRows; ++n, next += kLine)
        __builtin_prefetch(next, 0, 2);
    };
    if (x.groups() == 1)
      multiply_tiles<1, 1>(first, x[0], x.inputs(), found, fetch);
    else
      multiply_tiles<1, 2>(first, x[0], x.inputs(), found, fetch);
    for (std::size_t group = 0; group < x.groups(); ++group)
      write_turned(found.sums[0][group], layer, output, count, group * kTileRows,
                   std::min(rows - group * kTileRows, kTileRows));
  }
}

// Computes outputs [begin, end) of a layer for many rows. Some of the weight stays in the second cache while rows pass
// by, and a block is written while the next one is computed.
MAINSTEM_AVX512 void outputs_of_many_rows(const TiledRows& x, std::size_t rows, const Layer<BFloat16>& layer,
                                          std::size_t inputs, std::size_t begin, std::size_t end) {
  thread_local TiledRows weight;
  const Tiles tiles;
  TileSums found[2];
  int now = 0;
  TileBlock before{};
  std::size_t written = 0;  // rows of `before`
  const std::size_t at_once = (kTileBlock * kTileNumbers + x.inputs() - 1) / x.inputs();
  for (std::size_t first = begin; first < end; first += kTileOutputs) {
    const std::size_t until = std::min(first + kTileOutputs, end);
    weight.assign(layer.weight + first * inputs, until - first, inputs, true, 1);
    for (std::size_t row = 0; row < rows; row += kTileBlock)
      for (std::size_t output = first; output < until; output += kTileBlock) {
        const auto write = [&]() __attribute__((always_inline)) {
          for (std::size_t n = 0; n < at_once && written < before.rows; ++n, ++written)
            write_row(found[1 - now], layer, before, written);
        };
        multiply_tiles<2, 2>({x[row / kTileBlock], sizeof(Tile) / kTileRows, 2 * sizeof(Tile)},
                             weight[(output - first) / kTileBlock], x.inputs(), found[now], write);
        before = {row, std::min(kTileBlock, rows - row), output, std::min(kTileBlock, until - output)};
        written = 0;
        now = 1 - now;
      }
  }
  for (; written < before.rows; ++written)
    write_row(found[1 - now], layer, before, written);
}

#endif

void multiply_by_tiles(const BFloat16* given, std::size_t rows, std::size_t inputs,
                       std::span<const Layer<BFloat16>> layers, bool packed, unsigned threads) {
#ifdef __x86_64__
  thread_local TiledRows memory;
  const bool few = rows <= kTileBlock;
  memory.assign(given, rows, inputs, few, threads);
  share_outputs(layers, few ? kTileRows : kTileBlock, rows, inputs * sizeof(BFloat16), threads,
                [&, &x = memory](const Layer<BFloat16>& layer, std::size_t begin, std::size_t end) {
                  if (few)
                    outputs_of_few_rows(x, rows, layer, inputs, packed, begin, end);
                  else
                    outputs_of_many_rows(x, rows, layer, inputs, begin, end);
                });
#endif
}

// Computes so many rows that what is made of them stays small.
template <class Number>
void multiply_some(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
                   unsigned threads) {
  const bool packed =
      rows <= kPackedRows && std::ranges::all_of(layers, [](const auto& layer) { return layer.packed.codes; });
  if constexpr (sizeof(Number) == sizeof(BFloat16)) {
    if (has_tiles()) return multiply_by_tiles(x, rows, inputs, layers, packed, threads);
    if (has_dots()) return multiply_as<Dots>(x, rows, inputs, layers, packed, threads);
  }
  multiply_as<Plain<Number>>(x, rows, inputs, layers, packed, threads);
}

}  // namespace

template <class Number>
void multiply(const Number* x, std::size_t rows, std::size_t inputs, std::span<const Layer<Number>> layers,
              unsigned threads) {
  std::vector<Layer<Number>> some(layers.begin(), layers.end());
  for (std::size_t row = 0; row < rows; row += kRowsAtOnce) {
    const std::size_t count = std::min(kRowsAtOnce, rows - row);
    multiply_some<Number>(x + row * inputs, count, inputs, some, threads);
    for (auto& layer : some)
      layer.skip(count * layer.outputs);
  }
}

template void multiply(const float*, std::size_t, std::size_t, std::span<const Layer<float>>, unsigned);
template void multiply(const BFloat16*, std::size_t, std::size_t, std::span<const Layer<BFloat16>>, unsigned);

}  // namespace mainstem
