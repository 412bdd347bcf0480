// Copies rows of bytes by index, between tables whose rows are a stride apart, whatever the rows hold.
//
//   source  |row 0|..|row 1|..|row 2|..      row from[i]
//                                               |
//   target  |row 0||row 1||row 2||            row to[i]
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace mainstem {

struct Rows {
  std::uint8_t* first;
  std::ptrdiff_t stride;

  std::uint8_t* operator[](std::int32_t row) const { return first + row * stride; }
};

// Shorter or fewer rows gain nothing from bypassing the caches.
inline constexpr std::size_t kStreamedRow = 2048;
inline constexpr std::size_t kStreamedTotal = std::size_t{1} << 20;

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kLanes = 4;
inline constexpr std::size_t kBurst = 6 * kLine;   // copied from one lane before the next one's turn
inline constexpr std::size_t kAhead = 24 * kLine;  // prefetch distance

// Copies a line past the caches, to an address that is a multiple of 16.
inline void stream_line(std::uint8_t* to, const std::uint8_t* from) {
#ifdef __SSE2__
  for (std::size_t at = 0; at < kLine; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
#else
  std::memcpy(to, from, kLine);
#endif
}

// Makes streamed data visible before anything that follows.
inline void end_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Copies the first four rows in turns, as memcpy does with the parts of one long block. A single row ends before the
// hardware prefetcher detects it, so each lane prefetches into its next row. A line written through the caches would be
// read first.
inline void stream_rows(const Rows& target, std::span<const std::int32_t> to, const Rows& source,
                        std::span<const std::int32_t> from, std::size_t bytes) {
  const std::size_t lines = bytes / kLine * kLine;
  for (std::size_t begin = 0; begin < lines; begin += kBurst)
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::size_t end = std::min(begin + kBurst, lines);
      std::uint8_t* const write = target[to[lane]];
      const std::uint8_t* const read = source[from[lane]];
      const std::uint8_t* const next = lane + kLanes < from.size() ? source[from[lane + kLanes]] : read;
      for (std::size_t at = begin, soon = begin + kAhead; at < end; at += kLine, soon += kLine) {
        __builtin_prefetch(soon < lines ? read + soon : next + (soon - lines));
        stream_line(write + at, read + at);
      }
    }
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    std::memcpy(target[to[lane]] + lines, source[from[lane]] + lines, bytes - lines);
}

inline bool worth_streams(const Rows& target, std::size_t rows, std::size_t bytes) {
  const auto misaligned = reinterpret_cast<std::uintptr_t>(target.first) | static_cast<std::uintptr_t>(target.stride);
  return misaligned % 16 == 0 && bytes >= kStreamedRow && rows * bytes >= kStreamedTotal;
}

// Returns how many rows from `at` on are contiguous on both sides.
inline std::size_t run_length(std::span<const std::int32_t> to, std::span<const std::int32_t> from, std::size_t at) {
  std::size_t end = at + 1;
  while (end < to.size() && to[end] == to[end - 1] + 1 && from[end] == from[end - 1] + 1)
    ++end;
  return end - at;
}

// Copies row from[i] of `source` to row to[i] of `target`, `bytes` each. No two of all these rows may overlap.
inline void copy_rows(const Rows& target, std::span<const std::int32_t> to, const Rows& source,
                      std::span<const std::int32_t> from, std::size_t bytes) {
  const bool dense = target.stride == source.stride && target.stride == static_cast<std::ptrdiff_t>(bytes);
  const bool streamed = worth_streams(target, to.size(), bytes);
  std::size_t rows = 0;
  for (std::size_t at = 0; at < to.size(); at += rows) {
    rows = dense ? run_length(to, from, at) : 1;
    if (streamed && rows < kLanes && at + kLanes <= to.size()) {
      rows = kLanes;
      stream_rows(target, to.subspan(at), source, from.subspan(at), bytes);
    } else {
      std::memcpy(target[to[at]], source[from[at]], rows * bytes);
    }
  }
  if (streamed) end_streams();
}

}  // namespace mainstem
