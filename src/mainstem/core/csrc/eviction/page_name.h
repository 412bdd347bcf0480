// PageName: a name of a page that outlives it: a 64-bit hash of everything from the root to its end. A node keeps the
// name of its last page. From it, earlier names can be computed page by page, so nodes need not keep one per page.
#pragma once

#include <cstddef>
#include <cstdint>

#include "structure/children.h"

namespace mainstem {

// A polynomial over mixed pages, modulo 2**64; the factor is odd, so it has an inverse. No seed: the same calls must
// give the same evictions. Colliding names can only make a policy remember wrongly.
struct PageName {
  static constexpr std::uint64_t kFactor = 0xD1342543DE82EF95ull;
  static constexpr std::uint64_t inverse() {
    std::uint64_t x = kFactor;  // correct in 3 bits; each step doubles that (Newton)
    for (int i = 0; i < 5; ++i)
      x *= 2 - kFactor * x;
    return x;
  }
  static std::uint64_t mix(const std::uint8_t* bytes, std::size_t size) {
    constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
    std::uint64_t mixed = kOdd;
    for (; size >= 8; size -= 8, bytes += 8)
      mixed = fold(mixed ^ load_word(bytes), kOdd ^ mixed >> 32);
    if (size) mixed = fold(mixed ^ load_word(bytes, size), kOdd ^ size);
    mixed = (mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9ull;
    return mixed ^ mixed >> 29;
  }

  // The name of a page from the name of the one before it, and back.
  static std::uint64_t after(std::uint64_t before, const std::uint8_t* page, std::size_t bytes) {
    return before * kFactor + mix(page, bytes);
  }
  static std::uint64_t before(std::uint64_t after, const std::uint8_t* page, std::size_t bytes) {
    return (after - mix(page, bytes)) * inverse();
  }

  // The same over all pages of a key.
  static std::uint64_t of(std::uint64_t name, const std::uint8_t* key, std::size_t pages, std::size_t bytes) {
    for (; pages > 0; --pages, key += bytes)
      name = after(name, key, bytes);
    return name;
  }
  static std::uint64_t above(std::uint64_t name, const std::uint8_t* key, std::size_t pages, std::size_t bytes) {
    while (pages > 0)
      name = before(name, key + --pages * bytes, bytes);
    return name;
  }
};

}  // namespace mainstem
