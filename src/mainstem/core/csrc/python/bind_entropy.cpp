// The Python bindings of kernels/entropy.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>

#include "kernels/entropy.h"
#include "python/bind.h"

namespace mainstem {

using namespace nb::literals;

namespace {

template <class Number, int kDims>
using Array = nb::ndarray<Number, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint16_t> span_of(const Array<const std::uint16_t, 2>& tables) {
  return {tables.data(), tables.size()};
}

std::span<const std::uint8_t> span_of(const Array<const std::uint8_t, 1>& bytes) {
  return {bytes.data(), bytes.size()};
}

void create(EntropyCoder* self, const Array<const std::uint16_t, 2>& frequencies) {
  if (frequencies.shape(1) != kTokens || !EntropyCoder::are_tables(span_of(frequencies)))
    throw BadValue{"frequencies", "no such tables",
                   "[1 to 256 classes, " + std::to_string(kTokens) + "], rows of 1 or more that add up to 4096"};
  new (self) EntropyCoder(span_of(frequencies));
}

void check(const EntropyCoder& self, std::span<const std::uint8_t> classes, std::size_t rows) {
  if (classes.size() != rows)
    throw BadValue{"classes", std::to_string(classes.size()), "one a row: " + std::to_string(rows)};
  for (const std::uint8_t of_row : classes)
    if (of_row >= self.classes())
      throw BadValue{"classes", std::to_string(of_row), "below " + std::to_string(self.classes())};
}

std::size_t encode(const EntropyCoder& self, const Array<const std::int16_t, 2>& numbers,
                   const Array<const std::uint8_t, 1>& classes, const Array<std::uint8_t, 1>& out) {
  check(self, span_of(classes), numbers.shape(0));
  const nb::gil_scoped_release unlocked;
  return self.encode(numbers.data(), span_of(classes), numbers.shape(1), {out.data(), out.size()});
}

void decode(const EntropyCoder& self, const Array<const std::uint8_t, 1>& code,
            const Array<const std::uint8_t, 1>& classes, const Array<std::int16_t, 2>& numbers) {
  check(self, span_of(classes), numbers.shape(0));
  const nb::gil_scoped_release unlocked;
  if (!self.decode(span_of(code), span_of(classes), numbers.shape(1), numbers.data()))
    throw BadValue{"code", std::to_string(code.size()) + " bytes", "the code of as many numbers"};
}

}  // namespace

void bind_entropy(nb::module_& m) {
  nb::class_<EntropyCoder>(m, "EntropyCoder",
                           "Codes of int16 numbers (rANS) with fixed tables, one for each class of rows.\n\n"
                           "Raises BadArgument unless `frequencies` is uint16 [classes, TOKENS], each at least 1, and "
                           "those of a class add up to 4096.")
      .def_prop_ro_static(
          "TOKENS", [](nb::handle) { return kTokens; }, "Tokens of a table.")
      .def("__init__", &create, "frequencies"_a,
           nb::sig("def __init__(self, frequencies: numpy.typing.NDArray[numpy.uint16]) -> None"))
      .def("encode", &encode, "numbers"_a, "classes"_a, "out"_a,
           nb::sig("def encode(self, numbers: numpy.typing.NDArray[numpy.int16], classes: "
                   "numpy.typing.NDArray[numpy.uint8], out: numpy.typing.NDArray[numpy.uint8]) -> int"),
           "Encodes numbers [rows, columns], -32767 to 32767, by the class of each row; without the GIL.\n\n"
           "Returns the length of the code; 0: `out` has no room for it, and its content is undefined.")
      .def("decode", &decode, "code"_a, "classes"_a, "numbers"_a,
           nb::sig("def decode(self, code: numpy.typing.NDArray[numpy.uint8], classes: "
                   "numpy.typing.NDArray[numpy.uint8], numbers: numpy.typing.NDArray[numpy.int16]) -> None"),
           "Decodes into `numbers`; without the GIL. Bytes after the code are not read.\n\n"
           "Raises BadArgument if these bytes are no code of as many numbers; `numbers` are then undefined.");
}

}  // namespace mainstem
