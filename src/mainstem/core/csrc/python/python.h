// Conversions at the boundary with Python: buffers in, int32 arrays out, token sequences to symbols, integer arguments.
// Does not depend on trees or pools.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace mainstem {

namespace nb = nanobind;

struct BadTokens {
  std::string message;
};

// A contiguous view of any object with the buffer protocol, for the duration of one call.
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

// Raises the error of that name in mainstem.errors with these arguments.
void raise_error(const char* name, nb::handle arguments);

// NumPy arrays in signatures; an argument may be any object, which View checks.
#define MAINSTEM_ARRAY(Name, dtype)                                                   \
  class Name : public nb::object {                                                    \
    static bool any(PyObject*) {                                                      \
      return true;                                                                    \
    }                                                                                 \
    NB_OBJECT_DEFAULT(Name, nb::object, "numpy.typing.NDArray[numpy." dtype "]", any) \
  }
MAINSTEM_ARRAY(IdArray, "int32");
MAINSTEM_ARRAY(Int64Array, "int64");
MAINSTEM_ARRAY(Uint64Array, "uint64");
MAINSTEM_ARRAY(FloatArray, "float64");

// Returns numpy.empty(n, int32), and sets `data` to its memory.
IdArray new_ids(std::size_t n, std::int32_t** data);
// Returns an int32 view of a non-empty object with the buffer protocol.
IdArray array_over(nb::handle buffer);
IdArray to_array(std::span<const std::int32_t> ids);

// The symbols of a sequence of token ids, 4 little-endian bytes each, for the duration of one call.
//
//   bytes; packed 4-byte native integers (NumPy, array, DLPack)   read in place, unchecked until check()
//   other integers (int64, uint8, strided, ...), lists, tuples    converted and checked in one pass
//
// A match compares tokens in place with keys that were checked when they were stored, so only unmatched tokens need a
// check. Nobody may write to the tokens during the call; the buffer protocol keeps them from moving.
class Tokens {
 public:
  // Ids must be in [0, limit). Throws BadTokens if `tokens` is not a sequence of ids, with the position of a wrong one;
  // BadValue if the limit is not in [1, 2**31].
  Tokens(nb::handle tokens, std::int64_t limit);
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  std::span<const std::uint8_t> bytes() const { return bytes_; }
  // Throws BadTokens for the first id at or after position `from` that is out of range.
  void check(std::size_t from) const;

 private:
  struct Items;
  struct Buffer {
    ~Buffer() { PyBuffer_Release(&view); }  // does nothing without a buffer
    Py_buffer view{};
  };

  void read(nb::handle tokens);
  void read_buffer(nb::handle tokens);
  void read_dlpack(nb::handle tokens);
  void read_sequence(nb::handle tokens);
  void read_symbols(const void* data, std::size_t size);
  void read_view_of_bytes();
  void read_items(const Items& items);
  template <class... T>
  bool convert_if_one_of(const Items& items);
  template <class T>
  void convert(const Items& items);
  std::uint32_t* allocate(std::size_t n);
  [[noreturn]] void refuse_first(std::size_t from, std::size_t n) const;  // among symbols [from, n)

  std::uint32_t last_;    // the largest id allowed
  bool checked_ = false;  // all ids are checked
  bool signed_ = false;   // a symbol with its top bit set is shown as a negative number
  std::span<const std::uint8_t> bytes_;
  std::unique_ptr<std::uint32_t[]> own_;  // converted symbols
  Buffer buffer_;                         // read in place; kept from moving
  std::optional<nb::ndarray<nb::ro>> array_;
};

// Returns the symbols of token ids, all checked, as bytes. Throws like Tokens.
nb::bytes encode_tokens(nb::handle tokens, std::int64_t limit);

// Returns an integer argument in [least, most], like mainstem.errors.check_integer: of any type with __index__ except
// bool. Raises BadArgument.
std::int64_t integer(nb::handle value, const char* name, std::int64_t least, std::int64_t most);

}  // namespace mainstem
