#include "routing/prefixes.h"

#include <cstring>
#include <utility>

#include "structure/isa.h"

namespace mainstem {

namespace {

template <std::size_t kLanes>
struct Lanes {
  typedef std::uint64_t Words __attribute__((vector_size(8 * kLanes)));
};

struct Pages {
  SipKey key;
  const std::uint8_t* bytes;
  std::size_t page_bytes;  // a multiple of 4
  std::uint64_t first;     // the number of the first one
};

// As many pages as a word has lanes.
template <class Word, std::size_t... kLane>
MAINSTEM_INLINE void digest(const Pages& pages, Digest* found, std::index_sequence<kLane...>) {
  const std::uint8_t* bytes = pages.bytes;
  const std::size_t size = pages.page_bytes;
  SipState<Word> state(pages.key);
  state.widen();
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8)
    state.take(Word{load_word(bytes + kLane * size + at)...});
  if (at < size) state.take(Word{load_word(bytes + kLane * size + at, 4)...});
  state.take(Word{(pages.first + kLane)...});
  Word one, two;
  state.finish(&one, &two);
  std::uint64_t ones[sizeof...(kLane)], twos[sizeof...(kLane)];
  std::memcpy(ones, &one, sizeof one);
  std::memcpy(twos, &two, sizeof two);
  ((found[kLane] = {ones[kLane], twos[kLane]}), ...);
}

MAINSTEM_AVX512 void digest_on_avx512(const Pages& pages, Digest* found) {
  digest<Lanes<8>::Words>(pages, found, std::make_index_sequence<8>());
}
MAINSTEM_AVX2 void digest_on_avx2(const Pages& pages, Digest* found) {
  digest<Lanes<4>::Words>(pages, found, std::make_index_sequence<4>());
}
void digest_by_one(const Pages& pages, Digest* found) {
  digest<std::uint64_t>(pages, found, std::make_index_sequence<1>());
}

}  // namespace

PrefixDigests::PrefixDigests(SipKey key, std::uint32_t page_tokens)
    : page_bytes_(std::size_t{page_tokens} * sizeof(std::uint32_t)) {
  const Digest own = SipHash::of(key, Digest{1, 0}, nullptr, 0);
  key_ = {own.one, own.two};
}

void PrefixDigests::after(Digest before, std::uint32_t first, const std::uint32_t* tokens, std::size_t pages,
                          Digest* found) const {
  static const Isa isa = best_isa();
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(tokens);
  std::size_t page = 0;
  const auto each = [&](auto digests, std::size_t lanes) {
    for (; page + lanes <= pages; page += lanes)
      digests({key_, bytes + page * page_bytes_, page_bytes_, std::uint64_t{first} + page}, found + page);
  };
  if (isa == Isa::kAvx512) each(digest_on_avx512, 8);
  if (isa != Isa::kPlain) each(digest_on_avx2, 4);
  each(digest_by_one, 1);
  for (page = 0; page < pages; ++page)
    found[page] = before = before ^ found[page];
}

}  // namespace mainstem
