#include "kernels/entropy.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace mainstem {

namespace {

constexpr std::uint32_t kStates = 4;
constexpr std::uint32_t kWord = 1 << 16;  // the least state; below it, a word is read
constexpr std::uint32_t kTotal = 1 << kTableBits;
constexpr std::uint32_t kGreatest = (1 << kMagnitudeBits) - 1;

// A magnitude: its token, and the bits after that, the sign last. Zero has no sign.
struct Split {
  std::uint32_t token, bits, rest;

  explicit Split(std::int32_t number) {
    const std::uint32_t magnitude = std::min(static_cast<std::uint32_t>(number < 0 ? -number : number), kGreatest);
    const std::uint32_t sign = number < 0;
    if (magnitude < kPlain) {
      token = magnitude;
      bits = magnitude != 0;
      rest = sign;
    } else {
      const auto exponent = static_cast<std::uint32_t>(std::bit_width(magnitude)) - 1;
      const std::uint32_t lower = exponent - 1;
      token = kPlain + 2 * (exponent - kPlainBits) + (magnitude >> lower & 1);
      bits = lower + 1;
      rest = (magnitude & ((1u << lower) - 1)) << 1 | sign;
    }
  }
};

// The bits after a token, and the magnitude if they are zeros.
struct Join {
  std::uint8_t bits[kTokens];
  std::uint16_t magnitude[kTokens];
};

constexpr Join make_join() {
  Join join{};
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    const std::uint32_t above = token - kPlain;
    const std::uint32_t exponent = token < kPlain ? 0 : kPlainBits + above / 2;
    join.bits[token] = static_cast<std::uint8_t>(token < kPlain ? token != 0 : exponent);
    join.magnitude[token] =
        static_cast<std::uint16_t>(token < kPlain ? token : (1u << exponent) + (above % 2 << (exponent - 1)));
  }
  return join;
}

constexpr Join kJoin = make_join();

}  // namespace

bool EntropyCoder::are_tables(std::span<const std::uint16_t> frequencies) {
  if (frequencies.empty() || frequencies.size() % kTokens || frequencies.size() / kTokens > 256) return false;
  for (auto at = frequencies.begin(); at != frequencies.end(); at += kTokens)
    if (std::find(at, at + kTokens, 0) != at + kTokens || std::accumulate(at, at + kTokens, 0u) != kTotal) return false;
  return true;
}

EntropyCoder::EntropyCoder(std::span<const std::uint16_t> frequencies) : tables_(frequencies.size() / kTokens) {
  const std::uint16_t* frequency = frequencies.data();
  for (Table& table : tables_) {
    std::uint32_t start = 0;
    for (std::uint32_t token = 0; token < kTokens; ++token, ++frequency) {
      table.frequency[token] = *frequency;
      table.start[token] = static_cast<std::uint16_t>(start);
      std::fill_n(table.token + start, *frequency, static_cast<std::uint8_t>(token));
      start += *frequency;
    }
  }
}

std::size_t EntropyCoder::encode(const std::int16_t* numbers, std::span<const std::uint8_t> classes,
                                 std::size_t columns, std::span<std::uint8_t> out) const {
  std::uint32_t states[kStates];
  std::fill_n(states, kStates, kWord);
  std::uint8_t* at = out.data() + out.size();  // the last words are written first
  std::uint8_t* const first = out.data() + sizeof states;
  if (out.size() < sizeof states) return 0;
  const auto push_word = [&](std::uint32_t& state) {
    if (at - first < 2) return false;
    at -= 2;
    const auto word = static_cast<std::uint16_t>(state);
    std::memcpy(at, &word, 2);
    state >>= 16;
    return true;
  };
  for (std::size_t i = classes.size() * columns; i-- > 0;) {
    const Table& table = tables_[classes[i / columns]];
    const Split split(numbers[i]);
    std::uint32_t& state = states[i % kStates];
    if (state >= std::uint64_t{1} << (32 - split.bits) && !push_word(state)) return 0;
    state = state << split.bits | split.rest;
    const std::uint32_t frequency = table.frequency[split.token];
    if (state >= std::uint64_t{frequency} << (32 - kTableBits) && !push_word(state)) return 0;
    state = (state / frequency << kTableBits) + state % frequency + table.start[split.token];
  }
  std::memcpy(out.data(), states, sizeof states);
  const auto length = static_cast<std::size_t>(out.data() + out.size() - at);
  std::memmove(first, at, length);
  return sizeof states + length;
}

bool EntropyCoder::decode(std::span<const std::uint8_t> code, std::span<const std::uint8_t> classes,
                          std::size_t columns, std::int16_t* numbers) const {
  std::uint32_t states[kStates];
  if (code.size() < sizeof states) return false;
  std::memcpy(states, code.data(), sizeof states);
  const std::uint8_t* at = code.data() + sizeof states;
  const std::uint8_t* const end = code.data() + code.size();
  const auto pull_word = [&](std::uint32_t& state) {
    if (state >= kWord) return true;
    if (end - at < 2) return false;
    std::uint16_t word;
    std::memcpy(&word, at, 2);
    at += 2;
    state = state << 16 | word;
    return true;
  };
  std::size_t i = 0;
  for (const std::uint8_t number_class : classes) {
    const Table& table = tables_[number_class];
    for (std::size_t column = 0; column < columns; ++column, ++i) {
      std::uint32_t& state = states[i % kStates];
      const std::uint32_t slot = state & (kTotal - 1);
      const std::uint32_t token = table.token[slot];
      state = table.frequency[token] * (state >> kTableBits) + slot - table.start[token];
      if (!pull_word(state)) return false;
      const std::uint32_t bits = kJoin.bits[token];
      const std::uint32_t rest = state & ((1u << bits) - 1);
      state >>= bits;
      if (!pull_word(state)) return false;
      const std::int32_t magnitude = kJoin.magnitude[token] + static_cast<std::int32_t>(rest >> 1);
      numbers[i] = static_cast<std::int16_t>(rest & 1 ? -magnitude : magnitude);
    }
  }
  return std::all_of(states, states + kStates, [](std::uint32_t state) { return state == kWord; });
}

}  // namespace mainstem
