#include "python.h"

#include <algorithm>
#include <cstring>

namespace mainstem {

namespace {

[[noreturn]] void refuse(const std::string& value, std::size_t position, std::int64_t limit) {
  throw BadTokens{"token " + value + " at position " + std::to_string(position) + ": must be an integer from 0 to " +
                  std::to_string(limit - 1)};
}

// What is shown of a value that is refused, whatever it is.
std::string repr(PyObject* object) {
  const nb::object text = nb::steal(PyObject_Repr(object));
  if (text.is_valid()) return nb::cast<std::string>(text);
  PyErr_Clear();
  return std::string("of type ") + nb::cast<std::string>(nb::str(nb::type_name(nb::handle(object).type())));
}

// A bytes object under construction; its memory is written through `out`.
struct Building {
  explicit Building(std::size_t n)
      : object(nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n * sizeof(std::uint32_t))))) {
    if (!object.is_valid()) throw nb::python_error();
    out = reinterpret_cast<std::uint32_t*>(PyBytes_AS_STRING(object.ptr()));
  }
  nb::bytes done() { return nb::borrow<nb::bytes>(object); }

  nb::object object;
  std::uint32_t* out;
};

// Copies symbols of 4 bytes and says whether all are below the limit: two passes without a branch for each token.
bool copy_symbols(const void* data, std::size_t n, std::uint32_t* out, std::int64_t limit) {
  std::memcpy(out, data, n * sizeof(std::uint32_t));
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i)
    largest = std::max(largest, out[i]);
  return n == 0 || largest < limit;
}

template <class T>
void copy_checked(const Py_buffer& view, std::uint32_t* out, std::int64_t limit) {
  const auto n = static_cast<std::size_t>(view.shape[0]);
  const char* at = static_cast<const char*>(view.buf);
  for (std::size_t i = 0; i < n; ++i, at += view.strides[0]) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    bool good = static_cast<std::uint64_t>(value) < static_cast<std::uint64_t>(limit);
    if constexpr (std::is_signed_v<T>) good = good && value >= 0;
    if (!good) refuse(std::to_string(value), i, limit);
    out[i] = static_cast<std::uint32_t>(value);
  }
}

nb::bytes from_buffer(PyObject* tokens, std::int64_t limit) {
  Py_buffer view;
  if (PyObject_GetBuffer(tokens, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
    const nb::python_error why;
    throw BadTokens{std::string("tokens cannot be read as an integer array: ") + why.what()};
  }
  struct Release {
    Py_buffer* view;
    ~Release() { PyBuffer_Release(view); }
  } release{&view};
  const bool native = view.format[0] != '>' && view.format[0] != '!';
  const char code = view.format[std::strlen(view.format) - 1];
  const bool is_signed = std::strchr("bhilqn", code) != nullptr;
  const bool is_unsigned = std::strchr("BHILQN", code) != nullptr;
  if (view.ndim != 1) throw BadTokens{"tokens have " + std::to_string(view.ndim) + " dimensions: must have 1"};
  if (!native || !(is_signed || is_unsigned))
    throw BadTokens{std::string("tokens have the item format '") + view.format + "': must be a native integer type"};
  Building bytes(static_cast<std::size_t>(view.shape[0]));
  const bool packed = view.itemsize == 4 && view.strides[0] == 4;
  if (packed && copy_symbols(view.buf, static_cast<std::size_t>(view.shape[0]), bytes.out, limit)) return bytes.done();
  switch (view.itemsize * (is_signed ? -1 : 1)) {
    case -1:
      copy_checked<std::int8_t>(view, bytes.out, limit);
      break;
    case -2:
      copy_checked<std::int16_t>(view, bytes.out, limit);
      break;
    case -4:
      copy_checked<std::int32_t>(view, bytes.out, limit);
      break;
    case -8:
      copy_checked<std::int64_t>(view, bytes.out, limit);
      break;
    case 1:
      copy_checked<std::uint8_t>(view, bytes.out, limit);
      break;
    case 2:
      copy_checked<std::uint16_t>(view, bytes.out, limit);
      break;
    case 4:
      copy_checked<std::uint32_t>(view, bytes.out, limit);
      break;
    case 8:
      copy_checked<std::uint64_t>(view, bytes.out, limit);
      break;
    default:
      throw BadTokens{"tokens have items of an unknown size"};
  }
  return bytes.done();
}

nb::bytes from_symbols(const char* data, std::size_t size, std::int64_t limit) {
  if (size % sizeof(std::uint32_t))
    throw BadTokens{"bytes of length " + std::to_string(size) + ": must hold whole 4-byte symbols"};
  Building bytes(size / sizeof(std::uint32_t));
  const std::size_t n = size / sizeof(std::uint32_t);
  if (copy_symbols(data, n, bytes.out, limit)) return bytes.done();
  const std::uint32_t* wrong = std::find_if(bytes.out, bytes.out + n, [&](std::uint32_t id) { return id >= limit; });
  refuse(std::to_string(*wrong), static_cast<std::size_t>(wrong - bytes.out), limit);
}

// An int itself: no code of anybody's runs.
std::uint32_t from_int(PyObject* item, std::size_t position, std::int64_t limit) {
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (value < 0 || value >= limit || overflow) refuse(repr(item), position, limit);
  return static_cast<std::uint32_t>(value);
}

// Whatever else says that it is an integer.
std::uint32_t from_index(nb::object item, std::size_t position, std::int64_t limit) {
  if (PyBool_Check(item.ptr()) || !PyIndex_Check(item.ptr())) refuse(repr(item.ptr()), position, limit);
  const nb::object index = nb::steal(PyNumber_Index(item.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    refuse(repr(item.ptr()), position, limit);
  }
  return from_int(index.ptr(), position, limit);
}

nb::bytes from_sequence(PyObject* tokens, std::int64_t limit) {
  const nb::object fast = nb::steal(PySequence_Fast(tokens, "tokens must be a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  Building bytes(n);
  for (std::size_t i = 0; i < n; ++i) {
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    for (; i < n && PyLong_CheckExact(items[i]); ++i)
      bytes.out[i] = from_int(items[i], i, limit);
    if (i == n) break;
    bytes.out[i] = from_index(nb::borrow(items[i]), i, limit);
    // That may have run anybody's code, which may have changed the list.
    if (n > static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())))
      throw BadTokens{"tokens changed while being read"};
  }
  return bytes.done();
}

}  // namespace

nb::object new_ids(std::size_t n, std::int32_t** data) {
  // Never destroyed: they outlive the interpreter's own shutdown order.
  static PyObject* empty = nb::module_::import_("numpy").attr("empty").inc_ref().ptr();
  static PyObject* dtype = nb::module_::import_("numpy").attr("dtype")("int32").inc_ref().ptr();
  PyObject* size = PyLong_FromSize_t(n);
  PyObject* arguments[] = {size, dtype};
  const nb::object array = nb::steal(PyObject_Vectorcall(empty, arguments, 2, nullptr));
  Py_XDECREF(size);
  if (!array.is_valid()) throw nb::python_error();
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
  *data = static_cast<std::int32_t*>(view.buf);
  PyBuffer_Release(&view);  // the array keeps its memory
  return array;
}

nb::object to_array(std::span<const std::int32_t> ids) {
  std::int32_t* data = nullptr;
  nb::object array = new_ids(ids.size(), &data);
  if (!ids.empty()) std::memcpy(data, ids.data(), ids.size_bytes());
  return array;
}

nb::bytes encode_tokens(nb::handle tokens, std::int64_t limit) {
  PyObject* object = tokens.ptr();
  if (PyBytes_Check(object))
    return from_symbols(PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)), limit);
  if (PyByteArray_Check(object))
    return from_symbols(PyByteArray_AS_STRING(object), static_cast<std::size_t>(PyByteArray_GET_SIZE(object)), limit);
  if (PyMemoryView_Check(object) && nb::cast<std::string>(tokens.attr("format")) == "B")
    return encode_tokens(nb::steal(PyBytes_FromObject(object)), limit);
  if (PyList_Check(object) || PyTuple_Check(object)) return from_sequence(object, limit);
  if (PyObject_CheckBuffer(object)) return from_buffer(object, limit);
  if (PySequence_Check(object) && !PyUnicode_Check(object)) return from_sequence(object, limit);
  throw BadTokens{"tokens are of type " + nb::cast<std::string>(nb::str(nb::type_name(tokens.type()))) +
                  ": must be a list, tuple, integer array or bytes"};
}

}  // namespace mainstem
