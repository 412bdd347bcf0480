// SipHash-1-3 (https://github.com/veorq/SipHash): a keyed hash of 64 or 128 bits, for names that nobody without the key
// can make.
#pragma once

#include <bit>
#include <cstdint>

#include "structure/children.h"

namespace mainstem {

struct SipKey {
  std::uint64_t one = 0, two = 0;
};

struct Digest {  // 128 bits
  std::uint64_t one = 0, two = 0;
  bool operator==(const Digest&) const = default;
};

class SipHash {
 public:
  // Of a word, followed by bytes.
  static std::uint64_t of(SipKey key, std::uint64_t before, const std::uint8_t* bytes, std::size_t size) {
    SipHash state(key);
    state.take(before);
    state.take(bytes, size, size + 8);
    return state.finish(0xff);
  }
  // Of a digest, followed by bytes.
  static Digest of(SipKey key, Digest before, const std::uint8_t* bytes, std::size_t size) {
    SipHash state(key);
    state.b_ ^= 0xee;
    state.take(before.one);
    state.take(before.two);
    state.take(bytes, size, size + 16);
    const std::uint64_t one = state.finish(0xee);
    state.b_ ^= 0xdd;
    return {one, state.finish(0)};
  }

 private:
  explicit SipHash(SipKey key)
      : a_(key.one ^ 0x736f6d6570736575ull),
        b_(key.two ^ 0x646f72616e646f6dull),
        c_(key.one ^ 0x6c7967656e657261ull),
        d_(key.two ^ 0x7465646279746573ull) {}

  void take(std::uint64_t word) {
    d_ ^= word;
    round();
    a_ ^= word;
  }
  // The last bytes, and the length of all.
  void take(const std::uint8_t* bytes, std::size_t size, std::size_t length) {
    for (; size >= 8; size -= 8, bytes += 8)
      take(load_word(bytes));
    take((std::uint64_t{length} << 56) | (size ? load_word(bytes, size) : 0));
  }
  std::uint64_t finish(std::uint64_t mark) {
    c_ ^= mark;
    for (int i = 0; i < 3; ++i)
      round();
    return a_ ^ b_ ^ c_ ^ d_;
  }
  void round() {
    a_ += b_;
    b_ = std::rotl(b_, 13) ^ a_;
    a_ = std::rotl(a_, 32);
    c_ += d_;
    d_ = std::rotl(d_, 16) ^ c_;
    a_ += d_;
    d_ = std::rotl(d_, 21) ^ a_;
    c_ += b_;
    b_ = std::rotl(b_, 17) ^ c_;
    c_ = std::rotl(c_, 32);
  }

  std::uint64_t a_, b_, c_, d_;
};

}  // namespace mainstem
