// PrefixDigests: names of a prompt's prefixes, page by page, several pages at a time.
//
//   a page     SipHash-1-3 of 128 bits over its tokens and its number, under a secret key
//   a prefix   the XOR of its namespace and its pages
//
// No page waits for the one before it, so each lane of a vector hashes one. Two prefixes that differ have the same name
// with a probability of 2^-128: what they differ in is an XOR of hashes of different messages, which nobody without the
// key can tell from random ones (an XOR MAC).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tree/siphash.h"

namespace mainstem {

class PrefixDigests {
 public:
  // A key of its own follows from `key`, so that namespaces, which are named under that one, are no pages.
  PrefixDigests(SipKey key, std::uint32_t page_tokens);

  // Names the prefixes that end with each of these pages. `before`: the one that they follow; `first`: the number of
  // the first page.
  void after(Digest before, std::uint32_t first, const std::uint32_t* tokens, std::size_t pages, Digest* found) const;

  std::size_t page_tokens() const { return page_bytes_ / sizeof(std::uint32_t); }

 private:
  SipKey key_;
  std::size_t page_bytes_;
};

// The same of a longer prompt, bit by bit: by `some` or by `next`.
class PrefixNames {
 public:
  static constexpr std::size_t kAtOnce = 32;

  PrefixNames(const PrefixDigests& digests, Digest before, std::uint32_t first, std::span<const std::uint32_t> tokens)
      : digests_(digests), before_(before), page_(first), tokens_(tokens) {}

  // Of as many as are named together, from where the last call ended; empty: there are no more whole pages.
  std::span<const Digest> some() {
    const std::size_t size = digests_.page_tokens(), pages = std::min(kAtOnce, tokens_.size() / size);
    digests_.after(before_, page_, tokens_.data(), pages, found_.data());
    if (pages) before_ = found_[pages - 1];
    page_ += static_cast<std::uint32_t>(pages);
    tokens_ = tokens_.subspan(pages * size);
    return {found_.data(), pages};
  }
  // Of the next page; there is one.
  Digest next() {
    if (some_.empty()) some_ = some();
    const Digest digest = some_.front();
    some_ = some_.subspan(1);
    return digest;
  }

 private:
  const PrefixDigests& digests_;
  Digest before_;
  std::uint32_t page_;
  std::span<const std::uint32_t> tokens_;
  std::array<Digest, kAtOnce> found_;
  std::span<const Digest> some_;  // of those, not given by `next` yet
};

}  // namespace mainstem
