// Products of tiles of bfloat16, by AMX: 16 rows of one matrix times 16 rows of another in one instruction.
//
// A tile of the first factor is read as it lies in memory: 16 rows of 32 numbers. The second factor is stored as the
// instruction wants it, with its pairs of numbers side by side. Of few rows of x it is x: so up to 32 rows take about
// as long as one, which is as long as the weight takes to arrive. Of many rows it is the weight, 32 outputs at a time,
// whose results then lie as they are wanted. An output is the same bits either way: the instruction adds the products
// of a pair, and pairs, in one order, and a product does not depend on which factor comes first. Intel, "Architecture
// Instruction Set Extensions Programming Reference", chapter 3; Linux, Documentation/arch/x86/xstate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/functions.h"
#include "kernels/parallel.h"
#include "kernels/scratch.h"
#include "kernels/vectors.h"

namespace mainstem {

inline constexpr std::size_t kTileRows = 16;     // of a weight, and of x
inline constexpr std::size_t kTileNumbers = 32;  // of a row
static_assert(kRowStep % kTileNumbers == 0);

// 16 rows of 32 numbers each.
struct alignas(64) Tile {
  std::uint32_t pairs[kTileRows][kTileNumbers / 2];
};
static_assert(sizeof(Tile) == 1024);

// Writes 32 numbers of 16 rows, `stride` numbers apart.
template <bool kPaired>
MAINSTEM_INLINE void copy_whole_tile(const BFloat16* rows, std::size_t stride, Tile& to) {
  Lanes<16>::Floats block[kTileRows];
#pragma GCC unroll 16
  for (std::size_t n = 0; n < kTileRows; ++n)
    block[n] = load<Lanes<16>::Floats>(rows + n * stride);
  if constexpr (kPaired) transpose<16>(block);
#pragma GCC unroll 16
  for (std::size_t n = 0; n < kTileRows; ++n)
    std::memcpy(to.pairs[n], &block[n], sizeof block[n]);
}

// Makes tiles of up to 16 rows of so many numbers, each two tiles behind the one before; what is missing is zeros.
template <bool kPaired>
MAINSTEM_AVX512 inline void copy_tiles(const BFloat16* rows, std::size_t count, std::size_t inputs, Tile* to) {
  for (std::size_t i = 0; i < inputs; i += kTileNumbers, to += 2) {
    const std::size_t numbers = std::min(kTileNumbers, inputs - i);
    if (count == kTileRows && numbers == kTileNumbers) {
      copy_whole_tile<kPaired>(rows + i, inputs, *to);
    } else {
      BFloat16 some[kTileRows][kTileNumbers] = {};
      for (std::size_t n = 0; n < count; ++n)
        std::copy_n(rows + n * inputs + i, numbers, some[n]);
      copy_whole_tile<kPaired>(some[0], kTileNumbers, *to);
    }
  }
}

// Rows as tiles: for each two groups of 16 rows, those of the first 32 numbers of either, of the next 32, ... In the
// second factor of a product a tile is `paired`: it has 16 rows of the pairs of one place.
class TiledRows {
 public:
  // Rows [count, inputs].
  void assign(const BFloat16* rows, std::size_t count, std::size_t inputs, bool paired, unsigned threads) {
    groups_ = (count + kTileRows - 1) / kTileRows;
    steps_ = (inputs + kTileNumbers - 1) / kTileNumbers;
    auto* const tiles = reinterpret_cast<Tile*>(memory_.take((groups_ + 1) / 2 * 2 * steps_ * sizeof(Tile) / 4));
    tiles_ = tiles;
    share_rows((groups_ + 1) / 2 * 2, kTileRows * inputs, threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t group = begin; group < end; ++group) {
        const std::size_t row = std::min(group * kTileRows, count), some = std::min(kTileRows, count - row);
        Tile* const first = tiles + group / 2 * 2 * steps_ + group % 2;
        (paired ? copy_tiles<true> : copy_tiles<false>)(rows + row * inputs, some, inputs, first);
      }
    });
  }

  // Returns the tiles of two groups.
  const Tile* operator[](std::size_t both) const { return tiles_ + both * 2 * steps_; }
  std::size_t groups() const { return groups_; }
  std::size_t inputs() const { return steps_ * kTileNumbers; }

 private:
  Scratch memory_;
  const Tile* tiles_ = nullptr;
  std::size_t groups_ = 0, steps_ = 0;
};

#ifdef __x86_64__

// The tiles of this thread as these kernels use them, for as long as it lives; then as they were.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) Layout {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } layout;
    for (int tile = 0; tile < 8; ++tile) {
      layout.row_bytes[tile] = 64;
      layout.rows[tile] = 16;
    }
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    __asm__ volatile("ldtilecfg %0" ::"m"(layout));
  }
  ~Tiles() {
    if (before_.bytes[0])
      __asm__ volatile("ldtilecfg %0" ::"m"(before_));
    else
      __asm__ volatile("tilerelease");
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Saved {
    std::uint8_t bytes[64];
  } before_;
};

// Sums of 16 rows times 16 rows: sums[group of the first factor][of the second][row of the first][of the second].
struct alignas(64) TileSums {
  float sums[2][2][kTileRows][kTileRows];
};

// Where the first factor is: rows are `row_bytes` apart, and so are their next 32 numbers `step_bytes`.
struct FirstFactor {
  const void* rows;
  std::size_t row_bytes, step_bytes;
};

// Computes kFirst groups of rows, of which the second is 1 KiB behind the first one, times kSecond groups of paired
// tiles. `meanwhile` is called once for each step: other units of the CPU are idle.
template <int kFirst, int kSecond, class Meanwhile>
MAINSTEM_INLINE void multiply_tiles(const FirstFactor& first, const Tile* second, std::size_t inputs, TileSums& out,
                                    const Meanwhile& meanwhile) {
  const auto* rows = static_cast<const char*>(first.rows);
  const std::size_t stride = first.row_bytes, line = 64;
  __asm__ volatile("tilezero %tmm0");
  __asm__ volatile("tilezero %tmm1");
  __asm__ volatile("tilezero %tmm2");
  __asm__ volatile("tilezero %tmm3");
  for (std::size_t i = 0; i < inputs; i += kTileNumbers, rows += first.step_bytes, second += 2) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" ::"r"(rows), "r"(stride) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm6" ::"r"(second), "r"(line) : "memory");
    __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0");
    if constexpr (kFirst == 2) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm5" ::"r"(rows + sizeof(Tile)), "r"(stride) : "memory");
      __asm__ volatile("tdpbf16ps %tmm6, %tmm5, %tmm2");
    }
    if constexpr (kSecond == 2) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm7" ::"r"(second + 1), "r"(line) : "memory");
      __asm__ volatile("tdpbf16ps %tmm7, %tmm4, %tmm1");
      if constexpr (kFirst == 2) __asm__ volatile("tdpbf16ps %tmm7, %tmm5, %tmm3");
    }
    meanwhile();
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(out.sums[0][0]), "r"(line) : "memory");
  if constexpr (kSecond == 2)
    __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(out.sums[0][1]), "r"(line) : "memory");
  if constexpr (kFirst == 2) {
    __asm__ volatile("tilestored %%tmm2, (%0,%1,1)" ::"r"(out.sums[1][0]), "r"(line) : "memory");
    __asm__ volatile("tilestored %%tmm3, (%0,%1,1)" ::"r"(out.sums[1][1]), "r"(line) : "memory");
  }
}

// Rows of a tile, so many bytes apart.
struct TileRows {
  const void* rows;
  std::size_t bytes;
};

// Computes kTiles tiles beside each other: the sums of `begin`, which lie as `out` does, or zeros if it is null, plus
// 16 rows of `first` times paired rows of `second`, of `steps` times 32 numbers. `meanwhile` is called once for each
// step, as above.
template <int kTiles, class Meanwhile>
MAINSTEM_INLINE void sum_of_tiles(const float* begin, TileRows first, TileRows second, std::size_t steps, TileRows out,
                                  const Meanwhile& meanwhile) {
  static_assert(kTiles == 2 || kTiles == 4);
  const auto* const sums = reinterpret_cast<const char*>(begin);
  const auto* rows = static_cast<const char*>(first.rows);
  const auto* pairs = static_cast<const char*>(second.rows);
  constexpr std::size_t kWidth = 64;  // bytes of a row of a tile
  if (sums) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm0" ::"r"(sums), "r"(out.bytes) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm1" ::"r"(sums + kWidth), "r"(out.bytes) : "memory");
    if constexpr (kTiles == 4) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" ::"r"(sums + 2 * kWidth), "r"(out.bytes) : "memory");
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm3" ::"r"(sums + 3 * kWidth), "r"(out.bytes) : "memory");
    }
  } else {
    __asm__ volatile("tilezero %tmm0");
    __asm__ volatile("tilezero %tmm1");
    if constexpr (kTiles == 4) {
      __asm__ volatile("tilezero %tmm2");
      __asm__ volatile("tilezero %tmm3");
    }
  }
  for (std::size_t step = 0; step < steps; ++step, rows += kWidth, pairs += kTileRows * second.bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" ::"r"(rows), "r"(first.bytes) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm5" ::"r"(pairs), "r"(second.bytes) : "memory");
    __asm__ volatile("tdpbf16ps %tmm5, %tmm4, %tmm0");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm6" ::"r"(pairs + kWidth), "r"(second.bytes) : "memory");
    __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm1");
    if constexpr (kTiles == 4) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm7" ::"r"(pairs + 2 * kWidth), "r"(second.bytes) : "memory");
      __asm__ volatile("tdpbf16ps %tmm7, %tmm4, %tmm2");
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm5" ::"r"(pairs + 3 * kWidth), "r"(second.bytes) : "memory");
      __asm__ volatile("tdpbf16ps %tmm5, %tmm4, %tmm3");
    }
    meanwhile();
  }
  auto* const to = const_cast<char*>(static_cast<const char*>(out.rows));
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(to), "r"(out.bytes) : "memory");
  __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(to + kWidth), "r"(out.bytes) : "memory");
  if constexpr (kTiles == 4) {
    __asm__ volatile("tilestored %%tmm2, (%0,%1,1)" ::"r"(to + 2 * kWidth), "r"(out.bytes) : "memory");
    __asm__ volatile("tilestored %%tmm3, (%0,%1,1)" ::"r"(to + 3 * kWidth), "r"(out.bytes) : "memory");
  }
}

#endif

}  // namespace mainstem
