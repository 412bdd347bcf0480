// BLAKE2b (RFC 7693): digests of up to 64 bytes, keyed or not, sequential.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

namespace mainstem {

// A hasher may be copied at any time: updates of the copy do not change the original.
class Blake2b {
 public:
  static constexpr std::size_t kMaxBytes = 64;  // of a digest, and of a key

  Blake2b(std::size_t digest_bytes, std::span<const std::uint8_t> key) : digest_bytes_(digest_bytes), state_(kIv) {
    state_[0] ^= 0x01010000u ^ key.size() << 8 ^ digest_bytes;
    if (key.empty()) return;
    std::memcpy(block_.data(), key.data(), key.size());
    filled_ = kBlock;
  }

  void update(std::span<const std::uint8_t> data) {
    while (!data.empty()) {
      if (filled_ == kBlock) compress(false);  // delayed until now: the last block is flagged as such
      const std::size_t n = std::min(kBlock - filled_, data.size());
      std::memcpy(block_.data() + filled_, data.data(), n);
      filled_ += n;
      data = data.subspan(n);
    }
  }

  // Writes `digest_bytes`. Call it once.
  void finish(std::uint8_t* digest) {
    std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), std::uint8_t{0});
    compress(true);
    std::memcpy(digest, state_.data(), digest_bytes_);
  }

 private:
  static_assert(std::endian::native == std::endian::little, "words are read and written as they lie");

  static constexpr std::size_t kBlock = 128;
  using Words = std::array<std::uint64_t, 8>;
  static constexpr Words kIv = {0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                                0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu, 0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};
  static constexpr std::uint8_t kSigma[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

  void compress(bool last) {
    hashed_ += filled_;
    std::array<std::uint64_t, 16> m, v;
    std::memcpy(m.data(), block_.data(), kBlock);
    std::copy(state_.begin(), state_.end(), v.begin());
    std::copy(kIv.begin(), kIv.end(), v.begin() + 8);
    v[12] ^= hashed_;  // fewer than 2**64 bytes
    if (last) v[14] = ~v[14];
    const auto mix = [&](int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) {
      v[a] += v[b] + x;
      v[d] = std::rotr(v[d] ^ v[a], 32);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 24);
      v[a] += v[b] + y;
      v[d] = std::rotr(v[d] ^ v[a], 16);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 63);
    };
    for (int round = 0; round < 12; ++round) {
      const std::uint8_t* s = kSigma[round % 10];
      mix(0, 4, 8, 12, m[s[0]], m[s[1]]);
      mix(1, 5, 9, 13, m[s[2]], m[s[3]]);
      mix(2, 6, 10, 14, m[s[4]], m[s[5]]);
      mix(3, 7, 11, 15, m[s[6]], m[s[7]]);
      mix(0, 5, 10, 15, m[s[8]], m[s[9]]);
      mix(1, 6, 11, 12, m[s[10]], m[s[11]]);
      mix(2, 7, 8, 13, m[s[12]], m[s[13]]);
      mix(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (std::size_t i = 0; i < state_.size(); ++i)
      state_[i] ^= v[i] ^ v[i + 8];
    filled_ = 0;
  }

  std::size_t digest_bytes_;
  Words state_;
  std::array<std::uint8_t, kBlock> block_{};
  std::size_t filled_ = 0;
  std::uint64_t hashed_ = 0;
};

}  // namespace mainstem
