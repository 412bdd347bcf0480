#include "kernels/attention.h"

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/parallel.h"
#include "kernels/spans.h"

namespace mainstem {

namespace {

constexpr std::size_t kFew = 16;         // rows of a part: threads compute its spans at the same time
constexpr std::size_t kQueries = 192;    // of a block of many rows, about
constexpr std::size_t kBlocks = 4;       // for a thread, at least
constexpr std::size_t kAlone = 1 << 15;  // numbers of partial results that one thread merges
constexpr std::size_t kMerged = 4;       // heads of a row that a thread merges at a time

// The merge is one function for all that merge, so that its sums are contracted in one way.
#define MAINSTEM_ALONE __attribute__((noinline, noclone))

MAINSTEM_AVX512 MAINSTEM_ALONE void merge_on_avx512(float* result, Sum& sum, const float* partial, const Sum& added,
                                                    std::size_t numbers) {
  merge_span<16>(result, sum, partial, added, numbers);
}
MAINSTEM_AVX2 MAINSTEM_ALONE void merge_on_avx2(float* result, Sum& sum, const float* partial, const Sum& added,
                                                std::size_t numbers) {
  merge_span<8>(result, sum, partial, added, numbers);
}
MAINSTEM_ALONE void merge_plainly(float* result, Sum& sum, const float* partial, const Sum& added,
                                  std::size_t numbers) {
  merge_span<8>(result, sum, partial, added, numbers);
}

template <int kLanes, Products kProducts, class Number>
MAINSTEM_INLINE void compute(const Block<Number>& block, typename Spans<kLanes, Number, kProducts>::Merge merge) {
  thread_local Scratch scratch;
  Spans<kLanes, Number, kProducts>(block, scratch, merge).compute();
}

template <class Number>
MAINSTEM_AVX512 void compute_with_dots(const Block<Number>& block) {
  compute<16, Products::kDots>(block, merge_on_avx512);
}
template <class Number>
MAINSTEM_AVX512 void compute_by_tiles(const Block<Number>& block) {
#ifdef __x86_64__
  const Tiles tiles;
  compute<16, Products::kTiles>(block, merge_on_avx512);
#endif
}
template <class Number>
MAINSTEM_AVX512 void compute_on_avx512(const Block<Number>& block) {
  compute<16, Products::kFloats>(block, merge_on_avx512);
}
template <class Number>
MAINSTEM_AVX2 void compute_on_avx2(const Block<Number>& block) {
  compute<8, Products::kFloats>(block, merge_on_avx2);
}
template <class Number>
void compute_plainly(const Block<Number>& block) {
  compute<8, Products::kFloats>(block, merge_plainly);
}

template <class Number>
MAINSTEM_AVX512 void finish_with_dots(const float* result, float weights, Number* out, std::size_t numbers) {
  finish<16, false>(result, weights, out, numbers);
}
template <class Number>
MAINSTEM_AVX512 void finish_on_avx512(const float* result, float weights, Number* out, std::size_t numbers) {
  finish<16, true>(result, weights, out, numbers);
}
template <class Number>
MAINSTEM_AVX2 void finish_on_avx2(const float* result, float weights, Number* out, std::size_t numbers) {
  finish<8, true>(result, weights, out, numbers);
}
template <class Number>
void finish_plainly(const float* result, float weights, Number* out, std::size_t numbers) {
  finish<8, true>(result, weights, out, numbers);
}

template <class Number>
struct Functions {
  void (*compute)(const Block<Number>&);
  void (*merge)(float*, Sum&, const float*, const Sum&, std::size_t);
  void (*finish)(const float*, float, Number*, std::size_t);
};

template <class Number>
Functions<Number> best_functions() {
  if constexpr (sizeof(Number) == sizeof(BFloat16))
    if (has_tiles()) return {compute_by_tiles<Number>, merge_on_avx512, finish_with_dots<Number>};
  if constexpr (sizeof(Number) == sizeof(BFloat16))
    if (has_dots()) return {compute_with_dots<Number>, merge_on_avx512, finish_with_dots<Number>};
  switch (best_isa()) {
    case Isa::kAvx512:
      return {compute_on_avx512<Number>, merge_on_avx512, finish_on_avx512<Number>};
    case Isa::kAvx2:
      return {compute_on_avx2<Number>, merge_on_avx2, finish_on_avx2<Number>};
    default:
      return {compute_plainly<Number>, merge_plainly, finish_plainly<Number>};
  }
}

}  // namespace

AttentionPlan::AttentionPlan(std::vector<Part> parts, std::size_t rows) : parts_(std::move(parts)), starts_(rows + 1) {
  std::vector<std::size_t> seen(rows);  // parts by row
  for (const auto& part : parts_) {
    for (const std::int64_t slot : part.slots)
      end_ = std::max(end_, slot + 1);
    for (const std::int32_t row : part.rows)
      ++seen[row];
  }
  for (std::size_t number = 0; number < parts_.size(); ++number) {
    const auto& part = parts_[number];
    const Range keys = seen_by(part, 0, part.rows.size());
    const bool short_one = keys.begin / kSpan == (keys.end - 1) / kSpan;
    const bool alone = std::ranges::all_of(part.rows, [&](std::int32_t row) { return seen[row] == 1; });
    if (alone && (short_one || part.rows.size() > kFew)) {
      whole_.push_back(number);
      whole_rows_ += part.rows.size();
    } else {
      add_spans(number);
    }
  }
  // Rows have few partial results, and those of a span are in one part: sorted, they are in the order of positions.
  std::ranges::stable_sort(spans_, {}, [](const Unit& unit) { return unit.keys.begin; });
  for (const auto& unit : spans_)
    for (const std::int32_t row : parts_[unit.part].rows)
      ++starts_[row + 1];
  for (std::size_t row = 0; row < rows; ++row)
    starts_[row + 1] += starts_[row];
  places_.resize(partials_);
  std::vector<std::size_t> next(starts_.begin(), starts_.end() - 1);
  for (const auto& unit : spans_)
    for (std::size_t i = 0; i < parts_[unit.part].rows.size(); ++i)
      places_[next[parts_[unit.part].rows[i]]++] = unit.place + i;
}

Range AttentionPlan::seen_by(const Part& part, std::size_t first, std::size_t last) const {
  Range all = part.seen[first];
  for (std::size_t i = first; i < last; ++i) {
    const Range own = part.seen[i];
    if (own.begin == own.end) continue;
    if (all.begin == all.end) all = own;
    all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
  }
  return all;
}

void AttentionPlan::add_spans(std::size_t number) {
  const std::size_t rows = parts_[number].rows.size();
  const Range keys = seen_by(parts_[number], 0, rows);
  for (std::int32_t begin = keys.begin, end; begin < keys.end; begin = end) {
    end = std::min((begin / kSpan + 1) * kSpan, keys.end);
    spans_.push_back({number, 0, rows, {begin, end}, partials_});
    partials_ += rows;
  }
}

// Cuts the parts of many rows into blocks of so many; the longest come first.
void AttentionPlan::cut_blocks(std::size_t rows) {
  if (rows == block_rows_) return;
  block_rows_ = rows;
  blocks_.clear();
  for (const std::size_t number : whole_)
    for (std::size_t first = 0, last; first < parts_[number].rows.size(); first = last) {
      last = std::min(first + rows, parts_[number].rows.size());
      blocks_.push_back({number, first, last, seen_by(parts_[number], first, last), kWhole});
    }
  std::ranges::stable_sort(blocks_, std::greater{}, &Unit::cost);
}

template <class Number>
void AttentionPlan::attend(const Number* queries, const KeysAndValues<Number>& given, const Heads& heads,
                           const Scores<Number>& scores, Number* out, unsigned threads) {
  const auto functions = best_functions<Number>();
  const std::size_t group = heads.group(), numbers = padded(heads.value_numbers);
  const std::size_t most = std::max<std::size_t>(1, kQueries / group);
  cut_blocks(std::clamp<std::size_t>(whole_rows_ * heads.kv_heads / (kBlocks * threads), 1, most));
  const std::size_t of_head = partials_ * group;  // partial results of a KV head
  const std::size_t all = heads.kv_heads * of_head;
  float* const results = memory_.take(all * (numbers + sizeof(Sum) / sizeof(float)));
  Sum* const sums = reinterpret_cast<Sum*>(results + all * numbers);
  const std::size_t units = blocks_.size() + spans_.size();
  share_out(units * heads.kv_heads, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t number = i / heads.kv_heads, head = i % heads.kv_heads;
      const auto& unit = number < blocks_.size() ? blocks_[number] : spans_[number - blocks_.size()];
      const bool whole = unit.place == kWhole;
      const std::size_t place = whole ? 0 : head * of_head + unit.place * group;
      const Block<Number> block{
          parts_[unit.part], unit.first, unit.last, unit.keys, head,
          queries,           given,      heads,     scores,    whole ? nullptr : results + place * numbers,
          sums + place,      out};
      functions.compute(block);
    }
  });
  if (spans_.empty()) return;
  const std::size_t size = rows() * heads.kv_heads;
  share_out(size, all * numbers <= kAlone ? size : kMerged, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t row = i / heads.kv_heads, head = i % heads.kv_heads;
      const std::span<const std::size_t> places{places_.data() + starts_[row], starts_[row + 1] - starts_[row]};
      if (places.empty()) continue;  // its results are whole
      thread_local Scratch scratch;
      float* const merged = scratch.take(numbers);
      for (std::size_t n = 0; n < group; ++n) {
        std::fill_n(merged, numbers, 0.0f);
        Sum sum = first_sum(scores, head * group + n);
        for (const std::size_t place : places) {
          const std::size_t at = head * of_head + place * group + n;
          functions.merge(merged, sum, results + at * numbers, sums[at], numbers);
        }
        functions.finish(merged, sum.weights, out + (i * group + n) * heads.value_numbers, heads.value_numbers);
      }
    }
  });
}

template void AttentionPlan::attend(const float*, const KeysAndValues<float>&, const Heads&, const Scores<float>&,
                                    float*, unsigned);
template void AttentionPlan::attend(const BFloat16*, const KeysAndValues<BFloat16>&, const Heads&,
                                    const Scores<BFloat16>&, BFloat16*, unsigned);

}  // namespace mainstem
