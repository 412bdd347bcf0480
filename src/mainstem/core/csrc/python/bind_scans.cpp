// The Python bindings of kernels/scans.h.
#include "kernels/scans.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "python/bind.h"

namespace mainstem {

using namespace nb::literals;

namespace {

using Address = std::uintptr_t;
using Sizes = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t>;

void scan_at(Address q, Address k, Address v, Address decay, Address beta, Address state, Address out,
             const Sizes& sizes, bool by_key, unsigned threads) {
  const auto floats = [](Address at) { return reinterpret_cast<const float*>(at); };
  const auto& [rows, tokens, heads, keys, values] = sizes;
  const nb::gil_scoped_release unlocked;
  scan(floats(q), floats(k), floats(v), floats(decay), floats(beta), reinterpret_cast<float*>(state),
       reinterpret_cast<float*>(out), {rows, tokens, heads, keys, values, by_key}, threads);
}

}  // namespace

void bind_scans(nb::module_& m) {
  m.def("scan", &scan_at, "q"_a, "k"_a, "v"_a, "decay"_a, "beta"_a, "state"_a, "out"_a, "sizes"_a, "by_key"_a,
        "threads"_a,
        "Computes linear attention with a decay, token by token, without the GIL.\n\n"
        "Tensors are addresses of contiguous float32. `sizes` are rows, tokens, heads, and numbers of a key and of a "
        "value. q and k are [rows, tokens, heads, keys], v and `out` [rows, tokens, heads, values], `decay` as k if "
        "`by_key`, else [rows, tokens, heads], as is `beta`, 0 without the delta rule. `state` [rows, heads, keys, "
        "values] is overwritten.");
}

}  // namespace mainstem
