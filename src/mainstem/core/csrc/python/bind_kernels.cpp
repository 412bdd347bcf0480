// The Python bindings of kernels/. Tensors come as addresses: a forward has hundreds of calls, and to exchange tensors
// by DLPack takes longer than some of them. `runtime/linears.py` and `runtime/norms.py`, the only callers, know the
// shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "kernels/linear.h"
#include "kernels/norm.h"
#include "python/bind.h"

namespace mainstem {

using namespace nb::literals;

namespace {

using Address = std::uintptr_t;
using Weight = std::tuple<Address, Address, std::size_t>;  // weight, bias or 0, outputs

template <class Number>
void multiply_at(Address x, std::size_t rows, std::size_t inputs, const std::vector<Weight>& weights, Address out,
                 unsigned threads) {
  std::vector<Layer<Number>> layers;
  layers.reserve(weights.size());
  auto* to = reinterpret_cast<Number*>(out);
  for (const auto& [weight, bias, outputs] : weights) {
    layers.push_back({reinterpret_cast<const Number*>(weight), reinterpret_cast<const Number*>(bias), to, outputs});
    to += rows * outputs;
  }
  multiply<Number>(reinterpret_cast<const Number*>(x), rows, inputs, layers, threads);
}

void check_step(std::size_t length, const char* name) {
  if (length == 0 || length % kRowStep) throw BadValue{name, std::to_string(length), "a multiple of 32"};
}

void linear(Address x, std::size_t rows, std::size_t inputs, const std::vector<Weight>& weights, Address out,
            bool bfloat16, unsigned threads) {
  check_step(inputs, "inputs");
  const nb::gil_scoped_release unlocked;
  (bfloat16 ? multiply_at<BFloat16> : multiply_at<float>)(x, rows, inputs, weights, out, threads);
}

template <class Number>
void norm_at(Address x, Address weight, Address out, std::size_t rows, std::size_t width, const NormRule& rule,
             unsigned threads) {
  rms_norm(reinterpret_cast<const Number*>(x), reinterpret_cast<const Number*>(weight), reinterpret_cast<Number*>(out),
           rows, width, rule, threads);
}

void norm(Address x, Address weight, Address out, std::size_t rows, std::size_t width, float epsilon, float offset,
          bool rounds, bool bfloat16, unsigned threads) {
  check_step(width, "width");
  const nb::gil_scoped_release unlocked;
  (bfloat16 ? norm_at<BFloat16> : norm_at<float>)(x, weight, out, rows, width, {epsilon, offset, rounds}, threads);
}

const char* isa_name() {
  switch (best_isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "";
  }
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("kernel_isa", &isa_name,
        "The instructions that `linear` and `rms_norm` use: \"avx512\", \"avx2\", or \"\": this machine cannot run "
        "them.");
  m.def("linear", &linear, "x"_a, "rows"_a, "inputs"_a, "weights"_a, "out"_a, "bfloat16"_a, "threads"_a,
        nb::sig("def linear(x: int, rows: int, inputs: int, weights: collections.abc.Sequence[tuple[int, int, int]], "
                "out: int, bfloat16: bool, threads: int) -> None"),
        "Computes linear layers that are given the same x, [rows, inputs], on PyTorch's threads, without the GIL.\n\n"
        "Each weight is (address, address of the bias or 0, outputs). `out` gets [rows, outputs] of one after another. "
        "All are contiguous and float32, or bfloat16. Raises BadArgument if `inputs` is not a multiple of 32.");
  m.def("rms_norm", &norm, "x"_a, "weight"_a, "out"_a, "rows"_a, "width"_a, "epsilon"_a, "offset"_a, "rounds"_a,
        "bfloat16"_a, "threads"_a,
        "Computes the RMS norm of x [rows, width] to `out`, times weight [width] plus `offset`, without the GIL.\n\n"
        "Tensors are addresses, as for `linear`. With `rounds`, what is multiplied by the weight is rounded before. "
        "Raises BadArgument if `width` is not a multiple of 32.");
}

}  // namespace mainstem
