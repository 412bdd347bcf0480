// SipHash-1-3 (https://github.com/veorq/SipHash): a keyed hash of 64 bits, for names that nobody without the key can
// make.
#pragma once

#include <bit>
#include <cstdint>

#include "structure/children.h"

namespace mainstem {

struct SipKey {
  std::uint64_t one = 0, two = 0;
};

class SipHash {
 public:
  // Of a word, followed by bytes.
  static std::uint64_t of(SipKey key, std::uint64_t before, const std::uint8_t* bytes, std::size_t size) {
    SipHash state(key);
    state.take(before);
    const std::uint64_t length = (size + 8) << 56;
    for (; size >= 8; size -= 8, bytes += 8)
      state.take(load_word(bytes));
    state.take(length | (size ? load_word(bytes, size) : 0));
    return state.finish();
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
  std::uint64_t finish() {
    c_ ^= 0xff;
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
