// Small pieces of the boundary with Python: buffers in, int32 arrays out, and token sequences to bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string>

namespace mainstem {

namespace nb = nanobind;

struct BadTokens {
  std::string message;
};

// A contiguous view of any object with the buffer protocol, for the time of one call.
class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_CONTIG_RO | PyBUF_FORMAT) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::span<const std::uint8_t> bytes() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }
  std::span<const std::int32_t> ids() const {
    if (view_.itemsize != 4 || !view_.format || std::string("iIlL").find(view_.format[0]) == std::string::npos)
      throw nb::type_error("page ids must be a contiguous int32 array");
    return {static_cast<const std::int32_t*>(view_.buf), static_cast<std::size_t>(view_.len) / 4};
  }

 private:
  Py_buffer view_{};
};

// numpy.empty(n, int32), and where its data lies.
nb::object new_ids(std::size_t n, std::int32_t** data);
nb::object to_array(std::span<const std::int32_t> ids);

// Token ids as little-endian 4-byte symbols: a list, tuple or other sequence of ints, a one-dimensional integer buffer,
// or bytes that hold whole symbols already. Throws BadTokens with the position of the first id outside [0, limit).
nb::bytes encode_tokens(nb::handle tokens, std::int64_t limit);

}  // namespace mainstem
