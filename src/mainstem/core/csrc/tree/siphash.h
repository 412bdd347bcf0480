// SipHash-1-3 (https://github.com/veorq/SipHash): a keyed hash of 64 or 128 bits, for names that nobody without the key
// can make.
#pragma once

#include <cstdint>

#include "structure/children.h"
#include "structure/isa.h"

namespace mainstem {

struct SipKey {
  std::uint64_t one = 0, two = 0;
};

struct Digest {  // 128 bits
  std::uint64_t one = 0, two = 0;
  bool operator==(const Digest&) const = default;
  Digest operator^(const Digest& other) const { return {one ^ other.one, two ^ other.two}; }
};

// The state while one message is hashed, or one in each lane of a vector of words.
template <class Word>
class SipState {
 public:
  explicit MAINSTEM_INLINE SipState(SipKey key)
      : a_(Word{} + (key.one ^ 0x736f6d6570736575ull)),
        b_(Word{} + (key.two ^ 0x646f72616e646f6dull)),
        c_(Word{} + (key.one ^ 0x6c7967656e657261ull)),
        d_(Word{} + (key.two ^ 0x7465646279746573ull)) {}

  MAINSTEM_INLINE void take(const Word& word) {
    d_ ^= word;
    round();
    a_ ^= word;
  }
  MAINSTEM_INLINE void finish(Word* hash) { end(0xff, hash); }
  // Before anything is taken, if the hash shall have two halves.
  MAINSTEM_INLINE void widen() { b_ ^= 0xee; }
  MAINSTEM_INLINE void finish(Word* one, Word* two) {
    end(0xee, one);
    b_ ^= 0xdd;
    end(0, two);
  }

 private:
  MAINSTEM_INLINE void end(std::uint64_t mark, Word* hash) {
    c_ ^= mark;
    for (int i = 0; i < 3; ++i)
      round();
    *hash = a_ ^ b_ ^ c_ ^ d_;
  }
  static MAINSTEM_INLINE void turn(Word* word, int bits) { *word = *word << bits | *word >> (64 - bits); }
  MAINSTEM_INLINE void round() {
    a_ += b_;
    turn(&b_, 13);
    b_ ^= a_;
    turn(&a_, 32);
    c_ += d_;
    turn(&d_, 16);
    d_ ^= c_;
    a_ += d_;
    turn(&d_, 21);
    d_ ^= a_;
    c_ += b_;
    turn(&b_, 17);
    b_ ^= c_;
    turn(&c_, 32);
  }

  Word a_, b_, c_, d_;
};

class SipHash {
 public:
  // Of a word, followed by bytes.
  static std::uint64_t of(SipKey key, std::uint64_t before, const std::uint8_t* bytes, std::size_t size) {
    SipState<std::uint64_t> state(key);
    state.take(before);
    take(&state, bytes, size, size + 8);
    std::uint64_t hash;
    state.finish(&hash);
    return hash;
  }
  // Of a digest, followed by bytes.
  static Digest of(SipKey key, Digest before, const std::uint8_t* bytes, std::size_t size) {
    SipState<std::uint64_t> state(key);
    state.widen();
    state.take(before.one);
    state.take(before.two);
    take(&state, bytes, size, size + 16);
    Digest digest;
    state.finish(&digest.one, &digest.two);
    return digest;
  }

 private:
  // The last bytes, and the length of all.
  static void take(SipState<std::uint64_t>* state, const std::uint8_t* bytes, std::size_t size, std::size_t length) {
    for (; size >= 8; size -= 8, bytes += 8)
      state->take(load_word(bytes));
    state->take((std::uint64_t{length} << 56) | (size ? load_word(bytes, size) : 0));
  }
};

}  // namespace mainstem
