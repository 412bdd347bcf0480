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

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/vectors.h"

namespace mainstem {

inline constexpr std::size_t kTileRows = 16;     // of a weight, and of x
inline constexpr std::size_t kTileNumbers = 32;  // of a row
static_assert(kRowStep % kTileNumbers == 0);

// Returns whether this process may use tiles of bfloat16; the kernel of Linux wants to be asked.
inline bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  static const bool allowed = [] {
    constexpr int kAskForPermission = 0x1023, kTileData = 18;
    if (!has_dots()) return false;
    std::uint32_t a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr std::uint32_t kBFloat16 = 1u << 22, kTile = 1u << 24;
    return (d & kBFloat16) && (d & kTile) && syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
  }();
  return allowed;
#else
  return false;
#endif
}

// The rows of x as tiles: 16 rows of x and 32 numbers of each are 16 rows of 16 pairs, the pairs of one place in a row.
class TiledRows {
 public:
  TiledRows(const BFloat16* x, std::size_t rows, std::size_t inputs)
      : count(rows),
        inputs(inputs),
        x(x),
        groups_((rows + kTileRows - 1) / kTileRows),
        tiles_(std::make_unique_for_overwrite<Tile[]>(groups_ * (inputs / kTileNumbers))) {
    for (std::size_t group = 0; group < groups_; ++group)
      for (std::size_t i = 0; i < inputs; i += kTileNumbers) {
        Tile& tile = tiles_[group * (inputs / kTileNumbers) + i / kTileNumbers];
        for (std::size_t n = 0; n < kTileRows; ++n) {
          const std::size_t row = group * kTileRows + n;
          for (std::size_t p = 0; p < kTileNumbers / 2; ++p)
            tile.pairs[p][n] = row < rows ? load<std::uint32_t>(x + row * inputs + i + 2 * p) : 0;
        }
      }
  }

  // Returns the first tile of rows [16 group, 16 group + 16); those of the next numbers follow.
  const void* operator[](std::size_t group) const { return tiles_.get() + group * (inputs / kTileNumbers); }
  std::size_t groups() const { return groups_; }

  const std::size_t count, inputs;
  const BFloat16* const x;

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

// Computes 16 rows of a weight, [16, inputs] at `weight`, times one or two groups of rows of x. As much
// memory from `next` on, where the following rows of the weight are, is fetched meanwhile.
template <int kGroups>
MAINSTEM_INLINE void multiply_tiles(const BFloat16* weight, const BFloat16* next, const TiledRows& x, std::size_t group,
                                    TileSums& out) {
  const std::size_t stride = x.inputs * sizeof(BFloat16), line = 64;
  const auto* first = static_cast<const char*>(x[group]);
  const auto* second = kGroups > 1 ? static_cast<const char*>(x[group + 1]) : nullptr;
  __asm__ volatile("tilezero %tmm0");
  if (kGroups > 1) __asm__ volatile("tilezero %tmm1");
  for (std::size_t i = 0; i < x.inputs; i += kTileNumbers) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" ::"r"(weight + i), "r"(stride) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm3" ::"r"(first), "r"(line) : "memory");
    __asm__ volatile("tdpbf16ps %tmm3, %tmm2, %tmm0");
    if (kGroups > 1) {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" ::"r"(second), "r"(line) : "memory");
      __asm__ volatile("tdpbf16ps %tmm4, %tmm2, %tmm1");
      second += sizeof(float) * kTileRows * kTileRows;
    }
    first += sizeof(float) * kTileRows * kTileRows;
    for (std::size_t n = 0; n < kTileRows; ++n, next += line / sizeof *next)  // in the order in which they lie
      __builtin_prefetch(next, 0, 2);
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(out.sums[0]), "r"(line) : "memory");
  if (kGroups > 1) __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(out.sums[1]), "r"(line) : "memory");
}

#endif

}  // namespace mainstem
