#include "python/python.h"

#include <nanobind/stl/string.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "tree/tree.h"

namespace mainstem {

static_assert(std::endian::native == std::endian::little, "symbols are read in place, as little endian");

namespace {

constexpr std::size_t kSymbol = sizeof(std::uint32_t);

[[noreturn]] void refuse(const std::string& value, std::size_t position, std::uint32_t last) {
  throw BadTokens{"token " + value + " at position " + std::to_string(position) + ": must be an integer from 0 to " +
                  std::to_string(last)};
}

std::string name_of_type(nb::handle object) {
  return nb::cast<std::string>(nb::str(nb::type_name(object.type())));
}

// Returns a description of a rejected value of any type.
std::string repr(PyObject* object) {
  const nb::object text = nb::steal(PyObject_Repr(object));
  if (text.is_valid()) return nb::cast<std::string>(text);
  PyErr_Clear();
  return "of type " + name_of_type(object);
}

template <class T>
using Wide = std::conditional_t<(sizeof(T) > kSymbol), std::uint64_t, std::uint32_t>;

template <class T>
T load(const std::uint8_t* at) {  // from any address
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// The top bit of the result tells whether the value is outside [0, last]: it is set in a negative number, and in the
// difference if the value is larger. No branch, so that results can be combined with |. Valid for last < 2**31.
template <class T>
Wide<T> outside(T value, Wide<T> last) {
  const auto wide = static_cast<Wide<T>>(value);
  return wide | (last - wide);
}

template <class T>
bool top_bit(T bits) {
  return bits >> (8 * sizeof(T) - 1);
}

// The compiler vectorizes only loops of known length.
constexpr std::size_t kBlock = 32;

bool all_inside(const std::uint8_t* at, std::size_t n, std::uint32_t last) {
  std::uint32_t bad = 0;
  const auto gather = [&](std::size_t items) {
    for (std::size_t i = 0; i < items; ++i)
      bad |= outside(load<std::uint32_t>(at + i * kSymbol), last);
  };
  for (; n >= kBlock; n -= kBlock, at += kBlock * kSymbol)
    gather(kBlock);
  gather(n);
  return !top_bit(bad);
}

// Writes items as symbols. The top bit of the result tells whether one is out of range.
template <class T>
inline Wide<T> convert_run(const std::uint8_t* __restrict at, std::size_t n, std::ptrdiff_t stride, Wide<T> last,
                           std::uint32_t* __restrict out) {
  Wide<T> bad = 0;
  for (std::size_t i = 0; i < n; ++i, at += stride) {
    const T value = load<T>(at);
    bad |= outside(value, last);
    out[i] = static_cast<std::uint32_t>(value);
  }
  return bad;
}

template <class T>
bool convert_all(const std::uint8_t* at, std::size_t n, std::ptrdiff_t stride, Wide<T> last, std::uint32_t* out) {
  constexpr std::ptrdiff_t kPacked = sizeof(T);
  Wide<T> bad = 0;
  if (stride == kPacked)
    for (; n >= kBlock; n -= kBlock, at += kBlock * kPacked, out += kBlock)
      bad |= convert_run<T>(at, kBlock, kPacked, last, out);
  bad |= convert_run<T>(at, n, stride, last, out);
  return !top_bit(bad);
}

// Reads an int of one digit (30 bits), as nearly all ids are, without a call: a negative one as its two's complement,
// if at all. Returns false for anything else.
bool read_small(PyObject* item, std::uint32_t* out) {
  if (!PyLong_CheckExact(item)) return false;
  auto* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(number)) return false;
  *out = static_cast<std::uint32_t>(PyUnstable_Long_CompactValue(number));
#else
  const auto digits = static_cast<std::size_t>(Py_SIZE(item));  // less than 0 for a negative int
  if (digits > 1) return false;
  *out = static_cast<std::uint32_t>(digits * number->ob_digit[0]);
#endif
  return true;
}

// Converts an exact int: runs no user code.
std::uint32_t from_int(PyObject* item, std::size_t position, std::uint32_t last) {
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (value < 0 || value > last || overflow) refuse(repr(item), position, last);
  return static_cast<std::uint32_t>(value);
}

// Converts any other object with __index__.
std::uint32_t from_index(nb::object item, std::size_t position, std::uint32_t last) {
  if (PyBool_Check(item.ptr()) || !PyIndex_Check(item.ptr())) refuse(repr(item.ptr()), position, last);
  const nb::object index = nb::steal(PyNumber_Index(item.ptr()));
  if (!index.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // e.g. an interrupt
    PyErr_Clear();
    refuse(repr(item.ptr()), position, last);
  }
  return from_int(index.ptr(), position, last);
}

// Reads an integer of any type but bool. Returns nullopt if it is not an integer, or has more than 64 bits.
std::optional<std::int64_t> read_integer(PyObject* value) {
  std::uint32_t small = 0;
  if (read_small(value, &small)) return static_cast<std::int32_t>(small);
  if (PyBool_Check(value) || !PyIndex_Check(value)) return std::nullopt;
  const nb::object index = nb::steal(PyNumber_Index(value));
  if (!index.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
    return std::nullopt;
  }
  int overflow = 0;
  const std::int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  return overflow ? std::nullopt : std::optional(number);
}

// Returns the code of a native integer format of the struct module, or 0.
char integer_code(const char* format) {
  if (*format && std::strchr("@=<", *format)) ++format;
  return *format && std::strchr("bBhHiIlLqQnN", *format) && !format[1] ? *format : '\0';
}

// DLPack's numbers, https://dmlc.github.io/dlpack/latest/c_api.html
std::string device_name(int type, int id) {
  const char* names[] = {"", "cpu", "cuda", "cuda_host", "opencl", "", "", "vulkan", "metal", "", "rocm"};
  const bool known = type > 0 && static_cast<std::size_t>(type) < std::size(names) && *names[type];
  return (known ? names[type] : "type " + std::to_string(type)) + ":" + std::to_string(id);
}

bool host_memory(int device) {
  return device == nb::device::cpu::value || device == nb::device::cuda_host::value ||
         device == nb::device::rocm_host::value;
}

std::string name_of_type(nb::dlpack::dtype type) {
  const char* names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string name = type.code < std::size(names) ? names[type.code] : "code " + std::to_string(type.code) + " ";
  return name + std::to_string(type.bits) + (type.lanes == 1 ? "" : "x" + std::to_string(type.lanes));
}

// Never destroyed, so that interpreter shutdown cannot free it too early.
PyObject* numpy(const char* name) {
  return nb::module_::import_("numpy").attr(name).inc_ref().ptr();
}

// Calls a function of NumPy with an argument and the type int32.
IdArray call_for_ids(PyObject* function, PyObject* argument) {
  static PyObject* dtype = nb::module_::import_("numpy").attr("dtype")("int32").inc_ref().ptr();
  PyObject* arguments[] = {argument, dtype};
  PyObject* array = PyObject_Vectorcall(function, arguments, 2, nullptr);
  if (!array) throw nb::python_error();
  return nb::steal<IdArray>(array);
}

}  // namespace

void raise_error(const char* name, nb::handle arguments) {
  const nb::object type = nb::module_::import_("mainstem.errors").attr(name);
  PyErr_SetObject(type.ptr(), arguments.ptr());
}

IdArray new_ids(std::size_t n, std::int32_t** data) {
  static PyObject* empty = numpy("empty");
  const nb::object size = nb::steal(PyLong_FromSize_t(n));
  const IdArray array = call_for_ids(empty, size.ptr());
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
  *data = static_cast<std::int32_t*>(view.buf);
  PyBuffer_Release(&view);  // the array keeps its memory
  return array;
}

IdArray array_over(nb::handle buffer) {
  static PyObject* frombuffer = numpy("frombuffer");
  return call_for_ids(frombuffer, buffer.ptr());
}

IdArray to_array(std::span<const std::int32_t> ids) {
  std::int32_t* data = nullptr;
  IdArray array = new_ids(ids.size(), &data);
  if (!ids.empty()) std::memcpy(data, ids.data(), ids.size_bytes());
  return array;
}

// Items of one integer type with a constant stride.
struct Tokens::Items {
  const std::uint8_t* data;
  std::size_t n;
  std::ptrdiff_t stride;  // in bytes
  std::size_t item_bytes;
  bool is_signed;
};

Tokens::Tokens(nb::handle tokens, std::int64_t limit) : last_(static_cast<std::uint32_t>(limit - 1)) {
  if (limit < 1 || limit > std::int64_t{1} << 31) throw BadValue{"limit", std::to_string(limit), "1 to 2147483648"};
  read(tokens);
}

void Tokens::read(nb::handle tokens) {
  PyObject* object = tokens.ptr();
  if (PyList_Check(object) || PyTuple_Check(object)) return read_sequence(tokens);
  if (PyBytes_Check(object))
    return read_symbols(PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)));
  if (PyObject_CheckBuffer(object)) return read_buffer(tokens);
  if (nb::hasattr(tokens.type(), "__dlpack__")) return read_dlpack(tokens);
  if (PySequence_Check(object) && !PyUnicode_Check(object)) return read_sequence(tokens);
  throw BadTokens{"tokens are of type " + name_of_type(tokens) + ": must be a list, tuple, integer array or bytes"};
}

void Tokens::check(std::size_t from) const {
  const std::size_t n = bytes_.size() / kSymbol;
  if (checked_ || from >= n) return;
  if (!all_inside(bytes_.data() + from * kSymbol, n - from, last_)) refuse_first(from, n);
}

void Tokens::refuse_first(std::size_t from, std::size_t n) const {
  const auto id = [this](std::size_t i) { return load<std::uint32_t>(bytes_.data() + i * kSymbol); };
  std::size_t i = from;
  while (i + 1 < n && !top_bit(outside(id(i), last_)))
    ++i;
  refuse(signed_ ? std::to_string(static_cast<std::int32_t>(id(i))) : std::to_string(id(i)), i, last_);
}

// Not zero-filled, unlike a vector.
std::uint32_t* Tokens::allocate(std::size_t n) {
  own_.reset(new std::uint32_t[n]);
  bytes_ = {reinterpret_cast<const std::uint8_t*>(own_.get()), n * kSymbol};
  return own_.get();
}

void Tokens::read_symbols(const void* data, std::size_t size) {
  if (size % kSymbol) throw BadTokens{"bytes of length " + std::to_string(size) + ": must hold whole 4-byte symbols"};
  bytes_ = {static_cast<const std::uint8_t*>(data), size};
}

void Tokens::read_view_of_bytes() {
  const Py_buffer& view = buffer_.view;
  const auto size = static_cast<std::size_t>(view.len);
  read_symbols(view.buf, size);
  if (PyBuffer_IsContiguous(&view, 'C')) return;
  if (PyBuffer_ToContiguous(allocate(size / kSymbol), &view, view.len, 'C') != 0) throw nb::python_error();
}

void Tokens::read_buffer(nb::handle tokens) {
  Py_buffer& view = buffer_.view;
  if (PyObject_GetBuffer(tokens.ptr(), &view, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
    const nb::python_error why;
    throw BadTokens{std::string("tokens cannot be read as an integer array: ") + why.what()};
  }
  const char* format = view.format ? view.format : "B";
  if (PyByteArray_Check(tokens.ptr()) || (PyMemoryView_Check(tokens.ptr()) && !std::strcmp(format, "B")))
    return read_view_of_bytes();
  if (view.ndim != 1) throw BadTokens{"tokens have " + std::to_string(view.ndim) + " dimensions: must have 1"};
  const char code = integer_code(format);
  if (!code)
    throw BadTokens{std::string("tokens have the item format '") + format + "': must be a native integer type"};
  const Py_ssize_t stride = view.strides ? view.strides[0] : view.itemsize;  // ctypes gives none
  read_items({static_cast<const std::uint8_t*>(view.buf), static_cast<std::size_t>(view.shape[0]), stride,
              static_cast<std::size_t>(view.itemsize), std::strchr("bhilqn", code) != nullptr});
}

void Tokens::read_dlpack(nb::handle tokens) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(tokens, array))
    throw BadTokens{"tokens of type " + name_of_type(tokens) + " cannot be read by DLPack"};
  if (!host_memory(array.device_type()))
    throw BadTokens{"tokens are on device " + device_name(array.device_type(), array.device_id()) +
                    ": must be in CPU memory"};
  if (array.ndim() != 1) throw BadTokens{"tokens have " + std::to_string(array.ndim()) + " dimensions: must have 1"};
  const nb::dlpack::dtype type = array.dtype();
  const bool is_signed = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  const bool is_unsigned = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  if (!(is_signed || is_unsigned) || type.lanes != 1)
    throw BadTokens{"tokens have the item type " + name_of_type(type) + ": must be a native integer type"};
  read_items({static_cast<const std::uint8_t*>(array.data()), array.shape(0),
              static_cast<std::ptrdiff_t>(array.stride(0) * type.bits / 8), type.bits / 8u, is_signed});
  array_ = std::move(array);
}

void Tokens::read_items(const Items& items) {
  if (items.item_bytes == kSymbol && (items.stride == kSymbol || items.n < 2)) {
    signed_ = items.is_signed;
    return read_symbols(items.data, items.n * kSymbol);
  }
  if (!convert_if_one_of<std::int8_t, std::int16_t, std::int32_t, std::int64_t>(items) &&
      !convert_if_one_of<std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>(items))
    throw BadTokens{"tokens have items of an unknown size"};
}

// Converts items of one of these types. Returns whether they are.
template <class... T>
bool Tokens::convert_if_one_of(const Items& items) {
  const auto is = [&](std::size_t bytes, bool is_signed) {
    return items.item_bytes == bytes && items.is_signed == is_signed;
  };
  return ((is(sizeof(T), std::is_signed_v<T>) && (convert<T>(items), true)) || ...);
}

template <class T>
void Tokens::convert(const Items& items) {
  std::uint32_t* out = allocate(items.n);
  const bool good = convert_all<T>(items.data, items.n, items.stride, last_, out);
  checked_ = true;
  if (good) return;
  std::size_t i = 0;
  const std::uint8_t* at = items.data;
  while (i + 1 < items.n && !top_bit(outside(load<T>(at), Wide<T>{last_})))
    ++i, at += items.stride;
  refuse(std::to_string(load<T>(at)), i, last_);
}

void Tokens::read_sequence(nb::handle tokens) {
  const nb::object fast = nb::steal(PySequence_Fast(tokens.ptr(), "tokens must be a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  std::uint32_t* out = allocate(n);
  std::uint32_t bad = 0;
  signed_ = checked_ = true;
  for (std::size_t i = 0;; ++i) {
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    for (; i < n && read_small(items[i], &out[i]); ++i)
      bad |= outside(out[i], last_);
    if (top_bit(bad)) refuse_first(0, i);
    if (i == n) return;
    if (PyLong_CheckExact(items[i])) {
      out[i] = from_int(items[i], i, last_);
      continue;
    }
    out[i] = from_index(nb::borrow(items[i]), i, last_);
    // That may have run user code, which may have changed the list.
    if (n > static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())))
      throw BadTokens{"tokens changed while being read"};
  }
}

nb::bytes encode_tokens(nb::handle tokens, std::int64_t limit) {
  const Tokens symbols(tokens, limit);
  symbols.check(0);
  return nb::bytes(symbols.bytes().data(), symbols.bytes().size());
}

std::int64_t integer(nb::handle value, const char* name, std::int64_t least, std::int64_t most) {
  const std::optional<std::int64_t> number = read_integer(value.ptr());
  if (number && least <= *number && *number <= most) return *number;
  const std::string allowed = "an integer from " + std::to_string(least) + " to " + std::to_string(most);
  raise_error("BadArgument", nb::make_tuple(nb::str(name), value, nb::str(allowed.c_str())));
  throw nb::python_error();
}

}  // namespace mainstem
