// The Python bindings of kernels/. Tensors come as addresses: a forward has hundreds of calls, and to exchange tensors
// by DLPack takes longer than some of them. `runtime/kernels/linear.py`, `runtime/attention/few_rows.py` and
// `runtime/kernels/decoders.py`, the only callers, know the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/attention.h"
#include "kernels/decoder.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/tiles.h"
#include "python/bind.h"

namespace mainstem {

using namespace nb::literals;

namespace {

using Address = std::uintptr_t;
using GivenMatrix =
    std::tuple<Address, Address, Address, Address, unsigned>;  // weight, bias, codes, scales, bits; or 0
using Weight = std::pair<GivenMatrix, std::size_t>;            // and outputs

template <class Number>
Matrix<Number> matrix_at(const GivenMatrix& given, std::size_t outputs) {
  const auto [weight, bias, codes, scales, bits] = given;
  return {reinterpret_cast<const Number*>(weight),
          {reinterpret_cast<const std::uint32_t*>(codes), reinterpret_cast<const float*>(scales), bits},
          reinterpret_cast<const Number*>(bias),
          outputs};
}

template <class Number>
void multiply_at(Address x, std::size_t rows, std::size_t inputs, const std::vector<Weight>& weights, Address out,
                 bool rounds, unsigned threads) {
  std::vector<Layer<Number>> layers;
  layers.reserve(weights.size());
  std::size_t begin = 0;
  for (const auto& [given, outputs] : weights) {
    const auto matrix = matrix_at<Number>(given, outputs);
    auto& layer = layers.emplace_back(matrix.weight, matrix.packed, matrix.bias, nullptr, outputs);
    if (rounds)
      layer.out = reinterpret_cast<Number*>(out);
    else
      layer.sums = reinterpret_cast<float*>(out);
    layer.skip(begin);
    begin += rows * outputs;
  }
  multiply<Number>(reinterpret_cast<const Number*>(x), rows, inputs, layers, threads);
}

void check_step(std::size_t length, const char* name) {
  if (length == 0 || length % kRowStep) throw BadValue{name, std::to_string(length), "a multiple of 32"};
}

void linear(Address x, std::size_t rows, std::size_t inputs, const std::vector<Weight>& weights, Address out,
            bool rounds, bool bfloat16, unsigned threads) {
  if (inputs == 0) throw BadValue{"inputs", "0", "1 or more"};
  for (const auto& [given, outputs] : weights) {
    const auto [weight, bias, codes, scales, bits] = given;
    if (!codes) continue;
    check_step(inputs, "inputs");
    if (bits != 4 && bits != 8) throw BadValue{"bits", std::to_string(bits), "4 or 8"};
  }
  const nb::gil_scoped_release unlocked;
  (bfloat16 ? multiply_at<BFloat16> : multiply_at<float>)(x, rows, inputs, weights, out, rounds, threads);
}

template <class Number>
void norm_at(Address x, Address weight, Address out, std::size_t rows, std::size_t width, const NormRule& rule,
             unsigned threads) {
  rms_norm(reinterpret_cast<const Number*>(x), reinterpret_cast<const Number*>(weight), reinterpret_cast<Number*>(out),
           rows, width, rule, threads);
}

void norm(Address x, Address weight, Address out, std::size_t rows, std::size_t width, float epsilon, float offset,
          bool rounds, bool bfloat16, unsigned threads) {
  if (width == 0) throw BadValue{"width", "0", "1 or more"};
  const nb::gil_scoped_release unlocked;
  (bfloat16 ? norm_at<BFloat16> : norm_at<float>)(x, weight, out, rows, width, {epsilon, offset, rounds}, threads);
}

constexpr std::array kFunctions{"silu", "gelu_tanh", "gelu", "sigmoid", "softplus"};  // as in `Function`

void apply_function(const std::string& name, Address x, Address out, std::size_t count, bool bfloat16,
                    unsigned threads) {
  const auto found = std::ranges::find(kFunctions, name);
  if (found == kFunctions.end()) throw BadValue{"name", name, "silu, gelu_tanh, gelu, sigmoid or softplus"};
  const auto function = static_cast<Function>(found - kFunctions.begin());
  const nb::gil_scoped_release unlocked;
  if (bfloat16)
    apply(function, reinterpret_cast<const BFloat16*>(x), reinterpret_cast<BFloat16*>(out), count, threads);
  else
    apply(function, reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out), count, threads);
}

// ---- attention

template <class Number>
using Array = nb::ndarray<const Number, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using GivenPart =
    std::tuple<std::int32_t, Array<std::int64_t>, Array<std::int32_t>, Array<std::int32_t>, Array<std::int32_t>>;

AttentionPlan::Part checked(const GivenPart& given, std::size_t count, std::vector<bool>& sees) {
  const auto& [first, slots, rows, begins, ends] = given;
  if (rows.size() != begins.size() || rows.size() != ends.size() || rows.size() == 0)
    throw BadValue{"rows", std::to_string(rows.size()), "1 or more, each with a begin and an end"};
  AttentionPlan::Part part{
      first, {slots.data(), slots.data() + slots.size()}, {rows.data(), rows.data() + rows.size()}, {}};
  if (first < 0 || first + static_cast<std::int64_t>(slots.size()) > std::numeric_limits<std::int32_t>::max())
    throw BadValue{"first", std::to_string(first), "a position"};
  for (const std::int64_t slot : part.slots)
    if (slot < 0) throw BadValue{"slots", std::to_string(slot), "0 or more"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Range seen{begins.data()[i], ends.data()[i]};
    if (seen.begin < first || seen.begin > seen.end || seen.end > first + static_cast<std::int64_t>(slots.size()))
      throw BadValue{"ends", std::to_string(seen.end), "from the begin to the position after the last slot"};
    if (part.rows[i] < 0 || part.rows[i] >= static_cast<std::int64_t>(count))
      throw BadValue{"rows", std::to_string(part.rows[i]), "below the number of rows"};
    if (seen.begin < seen.end) sees[part.rows[i]] = true;
    part.seen.push_back(seen);
  }
  return part;
}

void make_plan(AttentionPlan* self, const std::vector<GivenPart>& parts, std::size_t rows) {
  std::vector<AttentionPlan::Part> checked_parts;
  std::vector<bool> sees(rows);
  for (const auto& part : parts)
    checked_parts.push_back(checked(part, rows, sees));
  for (std::size_t row = 0; row < rows; ++row)
    if (!sees[row]) throw BadValue{"parts", "nothing that row " + std::to_string(row) + " sees", "a key for each row"};
  new (self) AttentionPlan(std::move(checked_parts), rows);
}

void check_heads(const Heads& heads) {
  if (heads.kv_heads == 0 || heads.heads == 0 || heads.heads % heads.kv_heads)
    throw BadValue{"heads", std::to_string(heads.heads), "a multiple of the KV heads"};
  for (const std::size_t numbers : {heads.key_numbers, heads.value_numbers})
    if (numbers == 0) throw BadValue{"numbers", "0", "1 or more"};
}

void check_end(const AttentionPlan& plan, std::int64_t positions) {
  if (plan.end() > positions) throw BadValue{"slots", std::to_string(plan.end() - 1), "below the pool's positions"};
}

void attend(AttentionPlan& self, Address queries, Address keys, Address values, Address out,
            const std::array<std::size_t, 4>& sizes, const std::array<std::size_t, 2>& strides,
            const std::array<Address, 2>& scales, const std::string& stored, std::int64_t positions, float scale,
            float softcap, Address sinks, bool bfloat16, unsigned threads) {
  const Heads heads{sizes[0], sizes[1], sizes[2], sizes[3]};
  check_heads(heads);
  const Stored kind = stored == "int8" ? Stored::kInt8 : stored == "fp8" ? Stored::kFloat8 : Stored::kAsGiven;
  if (kind == Stored::kAsGiven && stored != "auto") throw BadValue{"stored", stored, "auto, int8 or fp8"};
  check_end(self, positions);
  const auto at = [&]<class Number>(Number) {
    const nb::gil_scoped_release unlocked;
    self.attend<Number>(
        reinterpret_cast<const Number*>(queries),
        {reinterpret_cast<const Number*>(keys), reinterpret_cast<const Number*>(values), strides[0], strides[1], kind,
         reinterpret_cast<const float*>(scales[0]), reinterpret_cast<const float*>(scales[1])},
        heads, {scale, softcap, reinterpret_cast<const Number*>(sinks)}, reinterpret_cast<Number*>(out), threads);
  };
  bfloat16 ? at(BFloat16{}) : at(float{});
}

// ---- layers of a decoder

using AnyDecoder = std::variant<Decoder<float>, Decoder<BFloat16>>;
using GivenNorm = std::tuple<Address, float, float>;  // weight or 0, epsilon, offset

template <class Number>
Decoder<Number> decoder(const std::array<std::size_t, 5>& sizes, const std::array<GivenNorm, 4>& norms,
                        const std::array<GivenMatrix, 7>& matrices, float scale, Activation activation) {
  const auto [hidden, inner, heads, kv_heads, numbers] = sizes;
  const auto norm = [&](std::size_t i) -> NormWeight<Number> {
    const auto& [weight, epsilon, offset] = norms[i];
    return {reinterpret_cast<const Number*>(weight), {epsilon, offset, false}};
  };
  const auto matrix = [&](std::size_t i, std::size_t outputs) { return matrix_at<Number>(matrices[i], outputs); };
  return {hidden,
          inner,
          {heads, kv_heads, numbers, numbers},
          {scale, 0, nullptr},
          norm(0),
          norm(1),
          norm(2),
          norm(3),
          matrix(0, heads * numbers),
          matrix(1, kv_heads * numbers),
          matrix(2, kv_heads * numbers),
          matrix(3, hidden),
          matrix(4, inner),
          matrix(5, inner),
          matrix(6, hidden),
          activation};
}

void make_decoder(AnyDecoder* self, const std::array<std::size_t, 5>& sizes, const std::array<GivenNorm, 4>& norms,
                  const std::array<GivenMatrix, 7>& matrices, float scale, const std::string& activation,
                  bool bfloat16) {
  check_heads({sizes[2], sizes[3], sizes[4], sizes[4]});
  for (const std::size_t i : {0, 1, 4})
    check_step(sizes[i], "sizes");
  const auto kind = activation == "silu" ? Activation::kSilu : Activation::kGeluTanh;
  if (kind == Activation::kGeluTanh && activation != "gelu_tanh")
    throw BadValue{"activation", activation, "silu or gelu_tanh"};
  if (bfloat16)
    new (self) AnyDecoder(decoder<BFloat16>(sizes, norms, matrices, scale, kind));
  else
    new (self) AnyDecoder(decoder<float>(sizes, norms, matrices, scale, kind));
}

void run_decoder(const AnyDecoder& self, Address x, Address cosines, Address sines, AttentionPlan& plan, Address keys,
                 Address values, const Array<std::int64_t>& slots, std::int64_t positions, unsigned threads) {
  check_end(plan, positions);
  if (slots.size() != plan.rows()) throw BadValue{"slots", std::to_string(slots.size()), "one for each row"};
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots.data()[i] < 0 || slots.data()[i] >= positions)
      throw BadValue{"slots", std::to_string(slots.data()[i]), "below the pool's positions"};
  std::visit(
      [&]<class Number>(const Decoder<Number>& layer) {
        const nb::gil_scoped_release unlocked;
        layer.run(reinterpret_cast<float*>(x), reinterpret_cast<const Number*>(cosines),
                  reinterpret_cast<const Number*>(sines), plan, reinterpret_cast<Number*>(keys),
                  reinterpret_cast<Number*>(values), slots.data(), threads);
      },
      self);
}

constexpr std::array<const char*, 5> kInstructions = {"plain", "avx2", "avx512", "avx512_bf16", "amx"};

const char* instructions_name() {
  return kInstructions[static_cast<std::size_t>(instructions())];
}

void limit(const std::string& name) {
  const auto found = std::ranges::find(kInstructions, name);
  if (found == kInstructions.end()) throw BadValue{"name", name, "plain, avx2, avx512, avx512_bf16 or amx"};
  limit_instructions(static_cast<Instructions>(found - kInstructions.begin()));
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("instructions", &instructions_name,
        "The instructions that kernels compute with: \"plain\", \"avx2\", \"avx512\", \"avx512_bf16\" (pairs of "
        "bfloat16) "
        "or \"amx\" (tiles of them). Each has an order of sums of its own.");
  m.def("limit_instructions", &limit, "name"_a,
        "Lets kernels compute with no more than these, so that machines of several kinds compute the same. Raises "
        "BadArgument if the name is unknown.");
  m.def(
      "linear", &linear, "x"_a, "rows"_a, "inputs"_a, "weights"_a, "out"_a, "rounds"_a, "bfloat16"_a, "threads"_a,
      nb::sig("def linear(x: int, rows: int, inputs: int, weights: collections.abc.Sequence[tuple[tuple[int, int, "
              "int, int, int], int]], out: int, rounds: bool, bfloat16: bool, threads: int) -> None"),
      "Computes linear layers that are given the same x, [rows, inputs], on PyTorch's threads, without the GIL.\n\n"
      "Each weight is ((address, bias, codes, scales, bits), outputs), all but the first 0 where there is none. `out` "
      "gets [rows, outputs] of one after another. All are contiguous and float32, or bfloat16; without `rounds`, `out` "
      "is float32, the sums as they are. Codes of 4 or 8 bits and scales are the same weight, see `kernels.Codes`. "
      "Raises BadArgument if `inputs` is 0, or not a multiple of 32 with codes, or these have other bits.");
  m.def("rms_norm", &norm, "x"_a, "weight"_a, "out"_a, "rows"_a, "width"_a, "epsilon"_a, "offset"_a, "rounds"_a,
        "bfloat16"_a, "threads"_a,
        "Computes the RMS norm of x [rows, width] to `out`, times weight [width] plus `offset`, without the GIL.\n\n"
        "Tensors are addresses, as for `linear`. With `rounds`, what is multiplied by the weight is rounded before. "
        "Raises BadArgument if `width` is 0.");
  m.def("apply", &apply_function, "name"_a, "x"_a, "out"_a, "count"_a, "bfloat16"_a, "threads"_a,
        "Computes a function of `count` numbers x to `out`, each from its own number alone, without the GIL: \"silu\", "
        "\"gelu\", \"gelu_tanh\", \"sigmoid\" or \"softplus\".\n\n"
        "Tensors are addresses, as for `linear`. Raises BadArgument if the name is unknown.");

  nb::class_<AttentionPlan>(m, "AttentionPlan",
                            "Which rows of a batch see which keys, for all layers of a kind. One thread at a time.")
      .def("__init__", &make_plan, "parts"_a, "rows"_a,
           nb::sig("def __init__(self, parts: collections.abc.Sequence[tuple[int, numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], "
                   "numpy.typing.NDArray[numpy.int32]]], rows: int) -> None"),
           "Each part is a position, the slots from there on, the rows that see some of them, and for each row the "
           "positions where these begin and end. A row sees keys of 256 positions, from a multiple of 256 on, in one "
           "part.\n\n"
           "Raises BadArgument if a row sees nothing or is not below `rows`, or a range is not one of the slots.")
      .def(
          "attend", &attend, "queries"_a, "keys"_a, "values"_a, "out"_a, "sizes"_a, "strides"_a, "scales"_a, "stored"_a,
          "positions"_a, "scale"_a, "softcap"_a, "sinks"_a, "bfloat16"_a, "threads"_a,
          nb::sig("def attend(self, queries: int, keys: int, values: int, out: int, sizes: tuple[int, int, int, int], "
                  "strides: tuple[int, int], scales: tuple[int, int], stored: str, positions: int, scale: float, "
                  "softcap: float, sinks: int, bfloat16: bool, threads: int) -> None"),
          "Computes `out` [rows, heads, numbers of a value], without the GIL. Tensors are addresses, as for `linear`."
          "\n\n"
          "`sizes` are heads, KV heads, and numbers of a key and a value. `keys` and `values` have `positions` rows, "
          "`strides` numbers apart: `stored` as \"auto\", like queries, or as \"int8\" or \"fp8\" times `scales`, "
          "float32 "
          "[positions, KV heads], 0 without. `softcap` and `sinks` are 0 without them. Raises BadArgument if a slot is "
          "not below `positions`, a size does not fit, or `stored` is unknown.");
  nb::class_<AnyDecoder>(m, "DecoderLayer", "A layer of a decoder, at the addresses of its weights.")
      .def("__init__", &make_decoder, "sizes"_a, "norms"_a, "matrices"_a, "scale"_a, "activation"_a, "bfloat16"_a,
           nb::sig(
               "def __init__(self, sizes: tuple[int, int, int, int, int], norms: collections.abc.Sequence[tuple[int, "
               "float, float]], matrices: collections.abc.Sequence[tuple[int, int, int, int, int]], scale: float, "
               "activation: str, bfloat16: bool) -> None"),
           "`sizes` are hidden, inner, heads, KV heads, and numbers of a head. `norms` are those before attention and "
           "before the MLP, of queries and of keys, each weight (0 for none), epsilon and offset, as for "
           "`rms_norm`. `matrices` are queries, keys, values, output, gate, up and down, each as for "
           "`linear`.\n\nRaises BadArgument if a size is not a multiple of 32, or the activation is unknown.")
      .def(
          "run", &run_decoder, "x"_a, "cosines"_a, "sines"_a, "plan"_a, "keys"_a, "values"_a, "slots"_a, "positions"_a,
          "threads"_a,
          nb::sig("def run(self, x: int, cosines: int, sines: int, plan: AttentionPlan, keys: int, values: int, slots: "
                  "numpy.typing.NDArray[numpy.int64], positions: int, threads: int) -> None"),
          "Computes x float32 [rows of the plan, hidden] in place, without the GIL, and writes the rows' keys and "
          "values to "
          "their slots.\n\n"
          "`cosines` and `sines` are [rows, numbers of a head]. Raises BadArgument if a slot is not below "
          "`positions`.");
}

}  // namespace mainstem
