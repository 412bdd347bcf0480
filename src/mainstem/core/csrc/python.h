// Small pieces of the boundary with Python: buffers in, int32 arrays out, token sequences to symbols, integer
// arguments. Knows nothing of trees or pools.
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

// Sets the error of that name in mainstem.errors, made with these arguments.
void raise_error(const char* name, nb::handle arguments);

// numpy.empty(n, int32), and where its data lies.
nb::object new_ids(std::size_t n, std::int32_t** data);
// A view, int32, of an object with the buffer protocol that holds at least one.
nb::object array_over(nb::handle buffer);
nb::object to_array(std::span<const std::int32_t> ids);

// The symbols of a sequence of token ids, 4 little-endian bytes each, for the time of one call.
//
//   bytes; packed 4-byte native integers (NumPy, array, DLPack)   read where they lie, unchecked until check()
//   other integers (int64, uint8, strided, ...), lists, tuples    converted in one pass, and checked in it
//
// A match compares what lies in place with keys that were checked when they were stored, so only what did not match
// needs a check. Nobody may write to the tokens during the call; the buffer protocol keeps them from moving.
class Tokens {
 public:
  // Ids must lie in [0, limit). Throws BadTokens for what is no sequence of ids, with the position of a wrong one;
  // BadValue if the limit is not in [1, 2**31].
  Tokens(nb::handle tokens, std::int64_t limit);
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  std::span<const std::uint8_t> bytes() const { return bytes_; }
  // Throws BadTokens for the first id at or behind position `from` that is out of range.
  void check(std::size_t from) const;

 private:
  struct Items;
  struct Buffer {
    ~Buffer() { PyBuffer_Release(&view); }  // nothing where none was taken
    Py_buffer view{};
  };

  void read(nb::handle tokens);
  void read_buffer(nb::handle tokens);
  void read_dlpack(nb::handle tokens);
  void read_sequence(nb::handle tokens);
  void read_symbols(const void* data, std::size_t size);
  void read_view_of_bytes();
  void read_items(const Items& items);
  template <class T>
  void convert(const Items& items);
  std::uint32_t* allocate(std::size_t n);
  [[noreturn]] void refuse_first(std::size_t from, std::size_t n) const;  // among symbols [from, n)

  std::uint32_t last_;    // the largest id allowed
  bool checked_ = false;  // no id is left to check
  bool signed_ = false;   // a symbol with its top bit set is shown as a negative number
  std::span<const std::uint8_t> bytes_;
  std::unique_ptr<std::uint32_t[]> own_;  // what was converted
  Buffer buffer_;                         // what is read in place, and kept from moving
  std::optional<nb::ndarray<nb::ro>> array_;
};

// The symbols of token ids, all checked, as bytes. Throws what Tokens throws.
nb::bytes encode_tokens(nb::handle tokens, std::int64_t limit);

// An integer argument in [least, most], as mainstem.errors.check_integer takes it: of any type that has __index__, but
// no bool. Raises BadArgument.
std::int64_t integer(nb::handle value, const char* name, std::int64_t least, std::int64_t most);

}  // namespace mainstem
