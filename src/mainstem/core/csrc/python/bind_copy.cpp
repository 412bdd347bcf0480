// The Python bindings of copy.h: two-dimensional byte arrays, and ids of their rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "python/bind.h"
#include "python/copy.h"
#include "tree/tree.h"

namespace mainstem {

using namespace nb::literals;

namespace {

using Table = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;

Rows rows_of(const Table& table, const char* name) {
  if (table.stride(1) != 1) throw BadValue{name, "a stride of " + std::to_string(table.stride(1)), "rows without gaps"};
  return {table.data(), table.stride(0)};
}

void check_ids(std::span<const std::int32_t> ids, const Table& table, const char* name) {
  for (const std::int32_t id : ids)
    if (id < 0 || static_cast<std::size_t>(id) >= table.shape(0))
      throw BadValue{name, std::to_string(id), "in [0, " + std::to_string(table.shape(0)) + ")"};
}

void copy(const Table& target, IdArray targets, const Table& source, IdArray sources) {
  const View to(targets), from(sources);
  const Rows written = rows_of(target, "target"), read = rows_of(source, "source");
  if (target.shape(1) != source.shape(1))
    throw BadValue{"bytes per row", std::to_string(source.shape(1)), "the target's " + std::to_string(target.shape(1))};
  if (to.ids().size() != from.ids().size())
    throw BadValue{"sources", std::to_string(from.ids().size()), "one per target: " + std::to_string(to.ids().size())};
  check_ids(to.ids(), target, "targets");
  check_ids(from.ids(), source, "sources");
  const nb::gil_scoped_release unlocked;
  copy_rows(written, to.ids(), read, from.ids(), target.shape(1));
}

}  // namespace

void bind_copy(nb::module_& m) {
  m.def("copy_rows", &copy, "target"_a, "targets"_a, "source"_a, "sources"_a,
        nb::sig("def copy_rows(target: numpy.typing.NDArray[numpy.uint8], targets: numpy.typing.NDArray[numpy.int32], "
                "source: numpy.typing.NDArray[numpy.uint8], sources: numpy.typing.NDArray[numpy.int32]) -> None"),
        "Copies row sources[i] of `source` to row targets[i] of `target`, both [rows, bytes], without the GIL.\n\n"
        "In one call, no row may be written twice, or both read and written. Raises BadArgument.");
}

}  // namespace mainstem
