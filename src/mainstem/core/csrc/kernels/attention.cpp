#include "kernels/attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "kernels/functions.h"
#include "kernels/parallel.h"

namespace mainstem {

namespace {

constexpr std::size_t kUnit = 256;       // keys of a unit, at most
constexpr float kLowest = -1e30f;        // below any score, and finite, so that differences are numbers
constexpr std::size_t kAlone = 1 << 15;  // numbers of partial results that one thread merges
constexpr std::size_t kMerged = 4;       // heads of a row that a thread merges at a time

// What belongs to a partial result.
struct Sum {
  float weights;  // relative to the highest score
  float highest;
};

// One KV head of one unit: its keys, and the queries that see some of them.
template <class Number>
struct Work {
  const AttentionPlan::Part& part;
  Range keys;
  std::size_t head;  // of keys and values
  const Number* queries;
  const KeysAndValues<Number>& given;
  const Heads& heads;
  const Scores<Number>& scores;
  float* results;  // [rows of the part, group, value_numbers]
  Sum* sums;       // [rows of the part, group]

  std::size_t group() const { return heads.heads / heads.kv_heads; }
  std::size_t count() const { return part.rows.size() * group(); }
  const Number* key(std::size_t i) const {
    return given.keys + part.slots[i] * given.key_stride + head * heads.key_numbers;
  }
  const Number* value(std::size_t i) const {
    return given.values + part.slots[i] * given.value_stride + head * heads.value_numbers;
  }
  const Number* query(std::size_t q) const {
    return queries + (part.rows[q / group()] * heads.heads + head * group() + q % group()) * heads.key_numbers;
  }
};

// Computes a unit: tiles of some keys, and some queries at a time. Queries, keys and results have the order of
// `load_pair`.
template <int kLanes, class Number>
class Tiles {
  using Floats = typename Lanes<kLanes>::Floats;
  static constexpr int kWide = 4;                        // vectors of keys in a tile, and of a value at a time
  static constexpr int kQueries = kLanes == 16 ? 6 : 2;  // whose scores or results are in registers together
  static constexpr std::size_t kKeys = kWide * kLanes;
  static constexpr std::size_t kBoth = 2 * kLanes;

 public:
  MAINSTEM_INLINE Tiles(const Work<Number>& work, Scratch& scratch) : work_(work), count_(work.count()) {
    const auto numbers = work.heads.key_numbers;
    queries_ = scratch.take((count_ + kKeys) * numbers + count_ * kKeys);
    keys_ = queries_ + count_ * numbers;
    weights_ = keys_ + kKeys * numbers;
    for (std::size_t q = 0; q < count_; ++q)
      for (std::size_t i = 0; i < numbers; i += kBoth) {
        const auto given = load_pair<kLanes>(work.query(q) + i);
        store_pair<kLanes>(queries_ + q * numbers + i,
                           {given.first * work.scores.scale, given.second * work.scores.scale});
      }
    std::fill_n(work.results, count_ * work.heads.value_numbers, 0.0f);
    std::fill_n(work.sums, count_, Sum{0, kLowest});
  }

  MAINSTEM_INLINE void compute() {
    const std::size_t end = work_.keys.end;
    for (std::size_t first = work_.keys.begin; first < end; first += kKeys) {
      const std::size_t last = std::min(first + kKeys, end);
      turn_keys(first, last);
      std::size_t q = 0;
      for (; q + kQueries <= count_; q += kQueries)
        score<kQueries>(q);
      last_scores<kQueries - 1>(q);
      for (q = 0; q < count_; ++q)
        weigh(q, first, last);
      add_values(first, last);
    }
  }

 private:
  // Makes rows of what the keys have at each place; the last key fills up.
  MAINSTEM_INLINE void turn_keys(std::size_t first, std::size_t last) {
    for (std::size_t begin = 0; begin < kKeys && first + begin < last; begin += kLanes)
      for (std::size_t i = 0; i < work_.heads.key_numbers; i += kBoth) {
        Floats near[kLanes], far[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
          const auto given = load_pair<kLanes>(work_.key(std::min(first + begin + lane, last - 1)) + i);
          near[lane] = given.first;
          far[lane] = given.second;
        }
        store_turned(near, keys_ + i * kKeys + begin);
        store_turned(far, keys_ + (i + kLanes) * kKeys + begin);
      }
  }

  MAINSTEM_INLINE void store_turned(Floats* block, float* to) {
    transpose<kLanes>(block);
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane)
      store<kLanes>(to + lane * kKeys, block[lane]);
  }

  // Computes the scores of some queries.
  template <int kCount>
  MAINSTEM_INLINE void score(std::size_t q) {
    const auto numbers = work_.heads.key_numbers;
    Floats total[kCount][kWide] = {};
    const float* query = queries_ + q * numbers;
    for (std::size_t i = 0; i < numbers; ++i) {
      Floats keys[kWide];
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        keys[part] = load<Floats>(keys_ + i * kKeys + part * kLanes);
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
        for (int part = 0; part < kWide; ++part)
          total[n][part] += keys[part] * query[n * numbers + i];
    }
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        store<kLanes>(weights_ + (q + n) * kKeys + part * kLanes, total[n][part]);
  }

  // Computes the scores of the last queries, fewer than kCount + 1.
  template <int kCount>
  MAINSTEM_INLINE void last_scores(std::size_t q) {
    if constexpr (kCount > 0) {
      if (count_ - q == kCount)
        score<kCount>(q);
      else
        last_scores<kCount - 1>(q);
    }
  }

  // Makes weights of the scores of a query, relative to the highest so far; keys that it does not see have none.
  MAINSTEM_INLINE void weigh(std::size_t q, std::size_t first, std::size_t last) {
    const Range seen = work_.part.seen[q / work_.group()];
    const auto from = static_cast<std::int64_t>(first);
    const auto begin = static_cast<std::int32_t>(std::clamp<std::int64_t>(seen.begin - from, 0, kKeys));
    const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(seen.end, last) - from);
    float* const weights = weights_ + q * kKeys;
    if (end <= begin) {
      std::fill_n(weights, kKeys, 0.0f);
      return;
    }
    const Floats unseen = Floats{} - std::numeric_limits<float>::infinity();
    Floats scores[kWide];
#pragma GCC unroll 4
    for (int part = 0; part < kWide; ++part) {
      scores[part] = load<Floats>(weights + part * kLanes);
      if (work_.scores.softcap > 0) scores[part] = capped<kLanes>(scores[part], work_.scores.softcap);
      // One comparison: GCC 12 takes an `and` of two apart, lane by lane.
      const auto after = typename Lanes<kLanes>::Words(numbered<kLanes>() + (part * kLanes - begin));
      scores[part] = after < static_cast<std::uint32_t>(end - begin) ? scores[part] : unseen;
    }
    Floats high[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      high[half] = scores[half] > scores[half + 2] ? scores[half] : scores[half + 2];
    Sum& sum = work_.sums[q];
    const float highest = std::max(sum.highest, highest_of<kLanes>(high[0] > high[1] ? high[0] : high[1]));
    const float kept = sum.highest == highest ? 1 : exponential<kLanes>(sum.highest - highest);
#pragma GCC unroll 4
    for (int part = 0; part < kWide; ++part) {
      scores[part] = exponential<kLanes>(scores[part] - highest);
      store<kLanes>(weights + part * kLanes, scores[part]);
    }
    sum = {sum.weights * kept + total_of<kLanes>((scores[0] + scores[1]) + (scores[2] + scores[3])), highest};
    if (kept == 1) return;
    float* result = work_.results + q * work_.heads.value_numbers;
    for (std::size_t i = 0; i < work_.heads.value_numbers; i += kLanes)
      store<kLanes>(result + i, load<Floats>(result + i) * kept);
  }

  MAINSTEM_INLINE void add_values(std::size_t first, std::size_t last) {
    const auto numbers = work_.heads.value_numbers;
    std::size_t column = 0;
    for (; column + kWide * kLanes <= numbers; column += kWide * kLanes)
      add_columns<kWide>(column, first, last);
    for (; column < numbers; column += kBoth)
      add_columns<2>(column, first, last);
  }

  template <int kWidth>
  MAINSTEM_INLINE void add_columns(std::size_t column, std::size_t first, std::size_t last) {
    std::size_t q = 0;
    for (; q + kQueries <= count_; q += kQueries)
      add<kWidth, kQueries>(q, column, first, last);
    last_added<kWidth, kQueries - 1>(q, column, first, last);
  }

  // Adds to the results of the last queries, fewer than kCount + 1.
  template <int kWidth, int kCount>
  MAINSTEM_INLINE void last_added(std::size_t q, std::size_t column, std::size_t first, std::size_t last) {
    if constexpr (kCount > 0) {
      if (count_ - q == kCount)
        add<kWidth, kCount>(q, column, first, last);
      else
        last_added<kWidth, kCount - 1>(q, column, first, last);
    }
  }

  // Adds kWidth vectors of the weighted values to the results of kCount queries.
  template <int kWidth, int kCount>
  MAINSTEM_INLINE void add(std::size_t q, std::size_t column, std::size_t first, std::size_t last) {
    const auto numbers = work_.heads.value_numbers;
    float* results = work_.results + q * numbers + column;
    const float* weights = weights_ + q * kKeys;
    Floats total[kCount][kWidth];
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
      for (int part = 0; part < kWidth; ++part)
        total[n][part] = load<Floats>(results + n * numbers + part * kLanes);
    for (std::size_t key = first; key < last; ++key) {
      const Number* value = work_.value(key) + column;
      Floats given[kWidth];
#pragma GCC unroll 2
      for (int part = 0; part < kWidth; part += 2) {
        const auto pair = load_pair<kLanes>(value + part * kLanes);
        given[part] = pair.first;
        given[part + 1] = pair.second;
      }
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
        for (int part = 0; part < kWidth; ++part)
          total[n][part] += given[part] * weights[n * kKeys + key - first];
    }
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
      for (int part = 0; part < kWidth; ++part)
        store<kLanes>(results + n * numbers + part * kLanes, total[n][part]);
  }

  const Work<Number>& work_;
  const std::size_t count_;  // of queries
  float* queries_;           // [count, key_numbers], scaled
  float* keys_;              // [key_numbers, kKeys]
  float* weights_;           // [count, kKeys], first the scores
};

template <int kLanes, class Number>
MAINSTEM_INLINE void compute_unit(const Work<Number>& work) {
  thread_local Scratch scratch;
  Tiles<kLanes, Number>(work, scratch).compute();
}

template <class Number>
MAINSTEM_AVX512 void unit_on_avx512(const Work<Number>& work) {
  compute_unit<16>(work);
}

template <class Number>
MAINSTEM_AVX2 void unit_on_avx2(const Work<Number>& work) {
  compute_unit<8>(work);
}

// Merges the partial results of one row, for the heads that share a KV head, to out [group, numbers]. The highest
// scores become factors.
struct Merge {
  std::span<const std::size_t> places;
  const float* results;
  Sum* sums;
  std::size_t group, numbers;
};

template <int kLanes, class Number>
MAINSTEM_INLINE void merge_heads(const Merge& given, const Number* sinks, Number* out) {
  for (std::size_t head = 0; head < given.group; ++head, out += given.numbers) {
    float highest = sinks ? widen(sinks[head]) : kLowest;
    for (const std::size_t place : given.places)
      highest = std::max(highest, given.sums[place * given.group + head].highest);
    float total = sinks ? exponential<kLanes>(widen(sinks[head]) - highest) : 0;
    for (const std::size_t place : given.places) {
      Sum& sum = given.sums[place * given.group + head];
      sum.highest = exponential<kLanes>(sum.highest - highest);
      total += sum.weights * sum.highest;
    }
    for (std::size_t column = 0; column < given.numbers; column += 2 * kLanes) {
      Pair<kLanes> result = {};
      for (const std::size_t place : given.places) {
        const std::size_t at = place * given.group + head;
        const auto part = load_pair<kLanes>(given.results + at * given.numbers + column);
        result.first += part.first * given.sums[at].highest;
        result.second += part.second * given.sums[at].highest;
      }
      store_pair<kLanes>(out + column, {result.first / total, result.second / total});
    }
  }
}

template <class Number>
MAINSTEM_AVX512 void merge_on_avx512(const Merge& given, const Number* sinks, Number* out) {
  merge_heads<16>(given, sinks, out);
}

template <class Number>
MAINSTEM_AVX2 void merge_on_avx2(const Merge& given, const Number* sinks, Number* out) {
  merge_heads<8>(given, sinks, out);
}

}  // namespace

AttentionPlan::AttentionPlan(std::vector<Part> parts, std::size_t rows) : parts_(std::move(parts)), starts_(rows + 1) {
  for (std::size_t number = 0; number < parts_.size(); ++number) {
    const auto& part = parts_[number];
    const auto keys = static_cast<std::int32_t>(part.slots.size());
    for (const std::int64_t slot : part.slots)
      end_ = std::max(end_, slot + 1);
    const std::size_t count = (part.slots.size() + kUnit - 1) / kUnit;
    for (std::size_t i = 0; i < count; ++i) {
      const auto cut = [&](std::size_t n) { return static_cast<std::int32_t>(keys * n / count); };
      units_.push_back({number, {cut(i), cut(i + 1)}, partials_});
      for (const std::int32_t row : part.rows)
        ++starts_[row + 1];
      partials_ += part.rows.size();
    }
  }
  for (std::size_t row = 0; row < rows; ++row)
    starts_[row + 1] += starts_[row];
  places_.resize(partials_);
  std::vector<std::size_t> next(starts_.begin(), starts_.end() - 1);
  for (const auto& unit : units_)
    for (std::size_t i = 0; i < parts_[unit.part].rows.size(); ++i)
      places_[next[parts_[unit.part].rows[i]]++] = unit.place + i;
}

template <class Number>
void AttentionPlan::attend(const Number* queries, const KeysAndValues<Number>& given, const Heads& heads,
                           const Scores<Number>& scores, Number* out, unsigned threads) {
  const bool wide = best_isa() == Isa::kAvx512;
  const std::size_t group = heads.heads / heads.kv_heads, numbers = heads.value_numbers;
  const std::size_t of_head = partials_ * group;  // partial results of a KV head
  const std::size_t all = heads.kv_heads * of_head;
  float* const results = memory_.take(all * (numbers + sizeof(Sum) / sizeof(float)));
  Sum* const sums = reinterpret_cast<Sum*>(results + all * numbers);
  share_out(units_.size() * heads.kv_heads, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto& unit = units_[i / heads.kv_heads];
      const std::size_t head = i % heads.kv_heads, place = head * of_head + unit.place * group;
      const Work<Number> work{parts_[unit.part],         unit.keys,   head, queries, given, heads, scores,
                              results + place * numbers, sums + place};
      (wide ? unit_on_avx512<Number> : unit_on_avx2<Number>)(work);
    }
  });
  const std::size_t size = rows() * heads.kv_heads;
  share_out(size, all * numbers <= kAlone ? size : kMerged, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t row = i / heads.kv_heads, head = i % heads.kv_heads, at = head * of_head;
      const std::span<const std::size_t> places{places_.data() + starts_[row], starts_[row + 1] - starts_[row]};
      const Merge merge{places, results + at * numbers, sums + at, group, numbers};
      const Number* sinks = scores.sinks ? scores.sinks + head * group : nullptr;
      (wide ? merge_on_avx512<Number> : merge_on_avx2<Number>)(merge, sinks, out + i * group * numbers);
    }
  });
}

template void AttentionPlan::attend(const float*, const KeysAndValues<float>&, const Heads&, const Scores<float>&,
                                    float*, unsigned);
template void AttentionPlan::attend(const BFloat16*, const KeysAndValues<BFloat16>&, const Heads&,
                                    const Scores<BFloat16>&, BFloat16*, unsigned);

}  // namespace mainstem
