// Products of tiles of bfloat16, by AMX: 16 rows of a weight times 16 rows of x in one instruction.
//
// A tile of the weight is read as it lies in memory: 16 rows of 32 numbers. x is stored as the instruction wants it,
// with its pairs of numbers side by side: that is little work, as few rows meet a weight. So up to 32 rows take about
// as long as one, which is as long as the weight takes to arrive. Intel, "Architecture Instruction Set Extensions
// Programming Reference", chapter 3; Linux, Documentation/arch/x86/xstate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/parallel.h"
#include "kernels/vectors.h"

namespace mainstem {

inline constexpr std::size_t kTileRows = 16;     // of a weight, and of x
inline constexpr std::size_t kTileNumbers = 32;  // of a row
static_assert(kRowStep % kTileNumbers == 0);

// The rows of x as tiles: 16 rows of x and 32 numbers of each are 16 rows of 16 pairs, the pairs of one place in a row.
class TiledRows {
 public:
  TiledRows(const BFloat16* x, std::size_t rows, std::size_t inputs, unsigned threads)
      : count(rows),
        inputs(inputs),
        groups_((rows + kTileRows - 1) / kTileRows),
        tiles_(std::make_unique_for_overwrite<Tile[]>(groups_ * (inputs / kTileNumbers))) {
    share_rows(groups_, kTileRows * inputs, threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t group = begin; group < end; ++group)
        for (std::size_t i = 0; i < inputs; i += kTileNumbers) {
          Tile& tile = tiles_[group * (inputs / kTileNumbers) + i / kTileNumbers];
          for (std::size_t n = 0; n < kTileRows; ++n) {
            const std::size_t row = group * kTileRows + n;
            for (std::size_t p = 0; p < kTileNumbers / 2; ++p)
              tile.pairs[p][n] = row < rows ? load<std::uint32_t>(x + row * inputs + i + 2 * p) : 0;
          }
        }
    });
  }

  // Returns the first tile of rows [16 group, 16 group + 16); those of the next numbers follow.
  const void* operator[](std::size_t group) const { return tiles_.get() + group * (inputs / kTileNumbers); }
  std::size_t groups() const { return groups_; }

  const std::size_t count, inputs;

 private:
  struct alignas(64) Tile {
    std::uint32_t pairs[kTileNumbers / 2][kTileRows];
  };
  static_assert(sizeof(Tile) == 1024);

  std::size_t groups_;
  std::unique_ptr<Tile[]> tiles_;
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

// Sums of 16 rows of a weight times 16 rows of x, or of two such groups of rows: sums[group][output][row of x].
struct alignas(64) TileSums {
  float sums[2][kTileRows][kTileRows];
};

// Computes 16 rows of a weight, [16, inputs] at `weight`, times a group of rows of x and the next one if there is one.
// As much memory from `next` on, where the following rows of the weight are, is fetched meanwhile, unless it is null.
inline void multiply_tiles(const BFloat16* weight, const BFloat16* next, const TiledRows& x, std::size_t group,
                           TileSums& out) {
  const std::size_t stride = x.inputs * sizeof(BFloat16), line = 64, size = sizeof(float) * kTileRows * kTileRows;
  const auto* first = static_cast<const char*>(x[group]);
  const auto* second = group + 1 < x.groups() ? static_cast<const char*>(x[group + 1]) : nullptr;
  __asm__ volatile("tilezero %tmm0");
  __asm__ volatile("tilezero %tmm1");
  for (std::size_t i = 0; i < x.inputs; i += kTileNumbers) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" ::"r"(weight + i), "r"(stride) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm3" ::"r"(first), "r"(line) : "memory");
    __asm__ volatile("tdpbf16ps %tmm3, %tmm2, %tmm0");
    first += size;
    if (second) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" ::"r"(second), "r"(line) : "memory");
      __asm__ volatile("tdpbf16ps %tmm4, %tmm2, %tmm1");
      second += size;
    }
    for (std::size_t n = 0; next && n < kTileRows; ++n, next += line / sizeof *next)  // in the order in which they lie
      __builtin_prefetch(next, 0, 2);
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(out.sums[0]), "r"(line) : "memory");
  __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(out.sums[1]), "r"(line) : "memory");
}

#endif

}  // namespace mainstem
