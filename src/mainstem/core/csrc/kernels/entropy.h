// Entropy coding of small integers with fixed tables: rANS (Duda, "Asymmetric numeral systems", 2013).
//
//   row     16 magnitudes below 16 are tokens of their own; a greater one is a token and its lower bits
//   class   of a row: a table of how often each token comes, of 4096
//   code    4 states of 4 bytes | words of 2 bytes, in the order in which they are read; little-endian
//
// Numbers take turns at the states, so that a processor decodes four at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mainstem {

inline constexpr std::uint32_t kTableBits = 12;
inline constexpr std::uint32_t kPlain = 16;          // magnitudes that are tokens
inline constexpr std::uint32_t kPlainBits = 4;       // the exponent of the first greater one
inline constexpr std::uint32_t kMagnitudeBits = 15;  // of the greatest magnitude, 32767
inline constexpr std::uint32_t kTokens = kPlain + 2 * (kMagnitudeBits - kPlainBits);

class EntropyCoder {
 public:
  // Frequencies [classes, kTokens]: each at least 1, those of a class add up to 4096.
  explicit EntropyCoder(std::span<const std::uint16_t> frequencies);

  static bool are_tables(std::span<const std::uint16_t> frequencies);

  std::size_t classes() const { return tables_.size(); }

  // Encodes numbers [classes.size(), columns] in (-32768, 32768). Returns the length of the code, or 0 if `out` has no
  // room for it; what is after the code is then undefined.
  std::size_t encode(const std::int16_t* numbers, std::span<const std::uint8_t> classes, std::size_t columns,
                     std::span<std::uint8_t> out) const;

  // Decodes as many numbers. Returns whether these bytes are the code of any; bytes after it are not read.
  bool decode(std::span<const std::uint8_t> code, std::span<const std::uint8_t> classes, std::size_t columns,
              std::int16_t* numbers) const;

 private:
  struct Table {
    std::uint16_t frequency[kTokens];
    std::uint16_t start[kTokens];
    std::uint8_t token[1 << kTableBits];  // that each of the 4096 belongs to
  };
  std::vector<Table> tables_;
};

}  // namespace mainstem
