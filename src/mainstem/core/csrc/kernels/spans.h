// What attention computes of some rows of a part and one KV head: scores, weights and sums, span after span.
//
// The order of a row's sums is that of positions, cut at multiples of kSpan and of a tile's keys. It is the same for
// any rows beside it: a key that a row does not see has no weight, which adds nothing.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/attention.h"
#include "kernels/functions.h"
#include "kernels/tiles.h"

namespace mainstem {

inline constexpr std::int32_t kSpan = 256;  // positions
inline constexpr float kLowest = -1e30f;    // below any score, and finite, so that differences are numbers
inline constexpr float kLog2e = 1.44269504088896341f;

// What belongs to a partial result. Scores are in units of log(2): a weight is a power of two.
struct Sum {
  float weights;  // relative to the highest score
  float highest;
};

// Rows of results have a multiple of so many numbers.
inline std::size_t padded(std::size_t numbers) {
  return (numbers + 31) / 32 * 32;
}

// Returns what a query head begins with: its sink.
template <class Number>
Sum first_sum(const Scores<Number>& scores, std::size_t head) {
  return scores.sinks ? Sum{1, widen(scores.sinks[head]) * kLog2e} : Sum{0, kLowest};
}

// Returns the number of a float of 8 bits: 4 of exponent and 3 of mantissa.
inline float float8(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t{code & 0x80u} << 24, rest = code & 0x7fu;
  if (rest == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t bits = sign | rest << 20;
  return load<float>(&bits) * 0x1p120f;  // its exponent counts from -7, that of a float32 from -127
}

// Returns pairs of the first numbers of two rows, of the second, ...
template <int kLanes, std::size_t... kLane>
MAINSTEM_INLINE Pair<kLanes> paired(const BFloat16* a, const BFloat16* b, std::index_sequence<kLane...>) {
  using Floats = typename Lanes<kLanes>::Floats;
  const auto of_a = load<typename Lanes<kLanes>::Pairs>(a), of_b = load<typename Lanes<kLanes>::Pairs>(b);
  const auto near = __builtin_shufflevector(of_a, of_b, (kLane / 2 + kLane % 2 * 2 * kLanes)...);
  const auto far = __builtin_shufflevector(of_a, of_b, (kLane / 2 + kLanes + kLane % 2 * 2 * kLanes)...);
  return {load<Floats>(&near), load<Floats>(&far)};
}

template <class Number>
struct Block {
  const AttentionPlan::Part& part;
  std::size_t first, last;  // of its rows
  Range keys;
  std::size_t head;  // of keys and values
  const Number* queries;
  const KeysAndValues<Number>& given;
  const Heads& heads;
  const Scores<Number>& scores;
  float* results;  // of one span: [last - first, group, padded(value_numbers)]; null: `out` is wanted
  Sum* sums;       // [last - first, group]
  Number* out;     // [rows of the batch, heads, value_numbers]

  std::size_t row_of(std::size_t query) const { return first + query / heads.group(); }
  std::size_t place_of(std::size_t query) const {
    const std::size_t group = heads.group();
    return part.rows[row_of(query)] * heads.heads + head * group + query % group;
  }
};

// Adds a partial result to the result of the spans before it.
template <int kLanes>
MAINSTEM_INLINE void merge_span(float* result, Sum& sum, const float* partial, const Sum& added, std::size_t numbers) {
  if (added.highest == kLowest) return;  // it sees none of the span
  const float highest = std::max(sum.highest, added.highest);
  const float kept = power_of_two<kLanes>(sum.highest - highest);
  const float weight = power_of_two<kLanes>(added.highest - highest);
  sum = {sum.weights * kept + added.weights * weight, highest};
  for (std::size_t i = 0; i < numbers; i += kLanes) {
    using Floats = typename Lanes<kLanes>::Floats;
    store<kLanes>(result + i, load<Floats>(result + i) * kept + load<Floats>(partial + i) * weight);
  }
}

// Writes what the first kernels leave: a result of all spans, of which pairs of vectors may be as `load_pair` reads.
template <int kLanes, bool kInPairs, class Number>
MAINSTEM_INLINE void finish(const float* result, float weights, Number* out, std::size_t numbers) {
  using Floats = typename Lanes<kLanes>::Floats;
  for (std::size_t i = 0; i < numbers; i += 2 * kLanes) {
    const Floats near = load<Floats>(result + i) / weights, far = load<Floats>(result + i + kLanes) / weights;
    Number last[2 * kLanes];
    Number* const to = i + 2 * kLanes <= numbers ? out + i : last;
    if constexpr (kInPairs) {
      store_pair<kLanes>(to, {near, far});
    } else {
      store<kLanes>(to, near);
      store<kLanes>(to + kLanes, far);
    }
    if (to == last) std::copy_n(last, numbers - i, out + i);
  }
}

// Reads rows of pages that the kernels cannot read where they are: they are in 8 bits, or end within a vector.
template <int kLanes, class Number>
struct Rows {
  const Number* numbers;
  const float* scales;
  std::size_t stride, count, kv_heads, head;
  Stored stored;

  bool in_place() const { return stored == Stored::kAsGiven && count == padded(count); }
  const Number* at(std::int64_t slot) const { return numbers + slot * stride + head * count; }

  MAINSTEM_INLINE void read(std::int64_t slot, Number* to) const {
    if (stored == Stored::kAsGiven) {
      std::copy_n(at(slot), count, to);
    } else {
      const auto* const codes = reinterpret_cast<const std::uint8_t*>(numbers) + slot * stride + head * count;
      const float scale = scales[slot * kv_heads + head];
      for (std::size_t i = 0; i < count; i += kLanes) {
        float wide[kLanes] = {};
        const std::size_t end = std::min<std::size_t>(kLanes, count - i);
        for (std::size_t lane = 0; lane < end; ++lane)
          wide[lane] = stored == Stored::kInt8 ? static_cast<float>(static_cast<std::int8_t>(codes[i + lane]))
                                               : float8(codes[i + lane]);
        store<kLanes>(to + i, load<typename Lanes<kLanes>::Floats>(wide) * scale);
      }
    }
    std::fill(to + count, to + padded(count), Number{});
  }
};

// How scores and weighted values are computed: from float32; from pairs of bfloat16 in one instruction; or from tiles
// of them, see kernels/tiles.h. Of bfloat16, weights are rounded to it.
enum class Products { kFloats, kDots, kTiles };

// Computes a block: tiles of some keys, and some queries at a time. With kFloats, queries, keys and results have the
// order of `load_pair`.
template <int kLanes, class Number, Products kProducts>
class Spans {
  static constexpr bool kDots = kProducts != Products::kFloats, kTiles = kProducts == Products::kTiles;
  using Floats = typename Lanes<kLanes>::Floats;
  using Words = typename Lanes<kLanes>::Words;
  static constexpr int kWide = 4;  // vectors of keys in a tile, and of a value at a time
  // Whose scores or results are in registers together.
  static constexpr int kQueries = kTiles ? static_cast<int>(kTileRows) : kLanes == 16 ? 6 : 2;
  static constexpr std::int32_t kKeys = kWide * kLanes;
  static constexpr std::size_t kTurns = kTiles ? 2 : 1;  // groups of queries that are under way together
  static constexpr std::size_t kBoth = 2 * kLanes;
  static constexpr std::size_t kPack = kDots ? 2 : 1;  // numbers in four bytes

 public:
  using Merge = void (*)(float*, Sum&, const float*, const Sum&, std::size_t);

  MAINSTEM_INLINE Spans(const Block<Number>& block, Scratch& scratch, Merge merge)
      : block_(block),
        keys_{block.given.keys,        block.given.key_scales, block.given.key_stride,
              block.heads.key_numbers, block.heads.kv_heads,   block.head,
              block.given.stored},
        values_{block.given.values,        block.given.value_scales, block.given.value_stride,
                block.heads.value_numbers, block.heads.kv_heads,     block.head,
                block.given.stored},
        merge_(merge),
        count_((block.last - block.first) * block.heads.group()),
        rows_(kTiles ? (count_ + kTileRows - 1) / kTileRows * kTileRows : count_),
        key_words_(padded(keys_.count) / kPack),
        value_numbers_(padded(values_.count)) {
    const bool whole = !block.results;
    const std::size_t key_room = padded(keys_.count) * kKeys, value_room = value_numbers_ * kKeys;
    const std::size_t sizes[] = {rows_ * key_words_,                            // queries
                                 kKeys * key_words_,                            // keys
                                 kDots ? value_room / kPack : 0,                // pairs of values
                                 kTurns * kQueries * kKeys,                     // weights
                                 keys_.in_place() ? 0 : key_room,               // rows of keys
                                 values_.in_place() ? 0 : value_room,           // and of values
                                 padded(std::max(keys_.count, values_.count)),  // zeros
                                 whole || kTiles ? rows_ * value_numbers_ : 0,  // results
                                 whole ? count_ * value_numbers_ : 0,           // and those of all spans
                                 whole ? 4 * count_ : 0,                        // and their sums
                                 count_ * kLanes,                               // lanes of weights
                                 2 * count_};                                   // ranges
    float* places[std::size(sizes)];
    std::size_t all = 0;
    for (const std::size_t size : sizes)
      all += (size + 15) / 16 * 16;
    float* next = scratch.take(all);
    for (std::size_t i = 0; i < std::size(sizes); next += (sizes[i++] + 15) / 16 * 16)
      places[i] = next;
    queries_ = places[0], turned_ = places[1], pairs_ = places[2], weights_ = places[3];
    staged_keys_ = reinterpret_cast<Number*>(places[4]), staged_values_ = reinterpret_cast<Number*>(places[5]);
    zeros_ = reinterpret_cast<const Number*>(places[6]);
    std::fill_n(places[6], sizes[6], 0.0f);
    results_ = whole || kTiles ? places[7] : block.results;
    merged_ = places[8];
    sums_ = whole ? reinterpret_cast<Sum*>(places[9]) : block.sums;
    merged_sums_ = reinterpret_cast<Sum*>(places[9]) + count_;
    totals_ = places[10];
    seen_ = reinterpret_cast<Range*>(places[11]);
    for (std::size_t q = 0; q < count_; ++q)
      seen_[q] = block.part.seen[block.row_of(q)];
    copy_queries();
  }

  MAINSTEM_INLINE void compute() {
    const auto [begin, end] = block_.keys;
    if (!block_.results) begin_merging();
    for (std::int32_t span = begin / kSpan * kSpan; span < end; span += kSpan) {
      std::fill_n(sums_, count_, Sum{0, kLowest});
      for (std::int32_t tile = std::max(span, begin / kKeys * kKeys); tile < std::min(span + kSpan, end); tile += kKeys)
        add_tile(tile);
      for (std::size_t q = 0; q < count_; ++q)
        if (sums_[q].highest != kLowest) sums_[q].weights = total_of<kLanes>(load<Floats>(totals_ + q * kLanes));
      if (block_.results) {
        if constexpr (kTiles) std::copy_n(results_, count_ * value_numbers_, block_.results);
        continue;
      }
      for (std::size_t q = 0; q < count_; ++q)
        merge_(merged_ + q * value_numbers_, merged_sums_[q], results_ + q * value_numbers_, sums_[q], value_numbers_);
    }
    if (block_.results) return;
    for (std::size_t q = 0; q < count_; ++q)
      finish<kLanes, !kDots>(merged_ + q * value_numbers_, merged_sums_[q].weights,
                             block_.out + block_.place_of(q) * values_.count, values_.count);
  }

 private:
  MAINSTEM_INLINE void copy_queries() {
    const std::size_t numbers = padded(keys_.count);
    Number row[kBoth];
    for (std::size_t q = 0; q < count_; ++q) {
      const Number* const query = block_.queries + block_.place_of(q) * keys_.count;
      float* const to = queries_ + q * key_words_;
      for (std::size_t i = 0; i < numbers; i += kBoth) {
        const Number* from = query + i;
        if (i + kBoth > keys_.count) {
          std::fill_n(row, kBoth, Number{});
          if (i < keys_.count) std::copy_n(query + i, keys_.count - i, row);
          from = row;
        }
        if constexpr (kDots)
          std::memcpy(to + i / kPack, from, kBoth * sizeof(Number));
        else
          store_pair<kLanes>(to + i, load_pair<kLanes>(from));
      }
    }
  }

  MAINSTEM_INLINE void begin_merging() {
    std::fill_n(merged_, count_ * value_numbers_, 0.0f);
    const std::size_t group = block_.heads.group();
    for (std::size_t q = 0; q < count_; ++q)
      merged_sums_[q] = first_sum(block_.scores, block_.head * group + q % group);
  }

  // The keys of a tile that any of some queries sees, relative to the tile.
  MAINSTEM_INLINE Range seen_by(std::size_t first, std::size_t last, std::int32_t tile) const {
    Range seen{kKeys, 0};
    for (std::size_t q = first; q < last; ++q) {
      const Range own = seen_of(q, tile);
      if (own.begin < own.end) seen = {std::min(seen.begin, own.begin), std::max(seen.end, own.end)};
    }
    return seen;
  }
  MAINSTEM_INLINE Range seen_of(std::size_t q, std::int32_t tile) const {
    return {std::clamp(seen_[q].begin - tile, 0, kKeys), std::clamp(seen_[q].end - tile, 0, kKeys)};
  }

  MAINSTEM_INLINE void add_tile(std::int32_t tile) {
    const Range seen{std::max(block_.keys.begin - tile, 0), std::min(block_.keys.end - tile, kKeys)};
    find_rows(tile, seen);
    turn_keys(seen);
    if constexpr (kDots) pair_values(seen);
    if constexpr (kTiles) {
      add_groups(tile);
    } else {
      std::size_t q = 0;
      for (; q + kQueries <= count_; q += kQueries)
        add_keys<kQueries>(q, tile);
      add_last<kQueries - 1>(q, tile);
    }
  }

  // Adds to the results of the last queries, fewer than kCount + 1.
  template <int kCount>
  MAINSTEM_INLINE void add_last(std::size_t q, std::int32_t tile) {
    if constexpr (kCount > 0) {
      if (count_ - q == kCount)
        add_keys<kCount>(q, tile);
      else
        add_last<kCount - 1>(q, tile);
    }
  }

  // 16 queries, of which some may be missing.
  struct Group {
    std::size_t query, next, last;  // the first of them, the next to weigh, and the one after the last
    float* weights;                 // first their scores
    bool first = true;              // of the tiles that they see of the span
  };

  // Adds a tile to the results of all queries. While the vectors make weights of the scores of a group, the tiles
  // compute the weighted values of the group before and the scores of the group after: either would wait for the
  // other.
  MAINSTEM_INLINE void add_groups(std::int32_t tile) {
    const std::size_t steps = key_words_ / kTileRows + (value_numbers_ + 63) / 64 * (kKeys / kTileNumbers);
    const std::size_t share = (kQueries + steps - 1) / steps;
    const auto nothing = []() __attribute__((always_inline)) {};
    Group before{}, group{}, after = next_group(0, tile, weights_);
    score_by_tiles(after, nothing);
    while (after.query < count_) {
      group = after;
      after = next_group(group.last, tile, group.weights == weights_ ? weights_ + kQueries * kKeys : weights_);
      const auto weigh_some = [&]() __attribute__((always_inline)) { weigh_group(group, group.next + share, tile); };
      if (before.last) add_by_tiles(before, weigh_some);
      score_by_tiles(after, weigh_some);
      weigh_group(group, group.last, tile);
      before = group;
    }
    if (before.last) add_by_tiles(before, nothing);
  }

  // Returns the next queries, from the given one on, of which any sees a key of the tile.
  MAINSTEM_INLINE Group next_group(std::size_t q, std::int32_t tile, float* weights) const {
    std::size_t last = q;
    for (; q < count_; q = last) {
      last = std::min(q + kQueries, count_);
      const Range seen = seen_by(q, last, tile);
      if (seen.begin < seen.end) break;
    }
    return {q, q, last, weights};
  }

  // Makes weights of the scores of queries of a group, up to the given one.
  MAINSTEM_INLINE void weigh_group(Group& group, std::size_t end, std::int32_t tile) {
    end = std::min(end, group.last);
#pragma GCC unroll 1
    for (std::size_t n = group.next; n < end; ++n) {
      group.first &= sums_[n].highest == kLowest;
      weigh(n, group.weights + (n - group.query) * kKeys, seen_of(n, tile));
    }
    group.next = end;
  }

  // Adds a tile to the results of kCount queries.
  template <int kCount>
  MAINSTEM_INLINE void add_keys(std::size_t q, std::int32_t tile) {
    const Range seen = seen_by(q, q + kCount, tile);
    if (seen.end <= seen.begin) return;
    score<kCount>(q);
    bool first = true;  // of the tiles that these queries see of the span
#pragma GCC unroll 1
    for (std::size_t n = q; n < q + kCount; ++n) {
      first &= sums_[n].highest == kLowest;
      weigh(n, weights_ + (n - q) * kKeys, seen_of(n, tile));
    }
    std::size_t column = 0;
    for (; column + kWide * kLanes <= value_numbers_; column += kWide * kLanes)
      add<kWide, kCount>(q, column, seen, first);
    for (; column < value_numbers_; column += kBoth)
      add<2, kCount>(q, column, seen, first);
  }

  // Finds the keys and values of a tile; those that nobody sees are zeros.
  MAINSTEM_INLINE void find_rows(std::int32_t tile, Range seen) {
    const std::int64_t* const slots = block_.part.slots.data() + (tile - block_.part.first);
    std::fill_n(key_rows_, kKeys, zeros_);
    std::fill_n(value_rows_, kKeys, zeros_);
    for (std::int32_t i = seen.begin; i < seen.end; ++i) {
      key_rows_[i] = row_of(keys_, slots[i], staged_keys_ + i * padded(keys_.count));
      value_rows_[i] = row_of(values_, slots[i], staged_values_ + i * value_numbers_);
    }
  }
  MAINSTEM_INLINE const Number* row_of(const Rows<kLanes, Number>& rows, std::int64_t slot, Number* staged) const {
    if (rows.in_place()) return rows.at(slot);
    rows.read(slot, staged);
    return staged;
  }

  // Makes rows of what the keys have at each place.
  MAINSTEM_INLINE void turn_keys(Range seen) {
    for (std::int32_t begin = 0; begin < kKeys; begin += kLanes) {
      if (begin + kLanes <= seen.begin || begin >= seen.end) continue;
      for (std::size_t i = 0; i < padded(keys_.count); i += kBoth) {
        Floats near[kLanes], far[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
          const Number* const key = key_rows_[begin + lane] + i;
          if constexpr (kDots) {
            near[lane] = load<Floats>(key);
          } else {
            const auto pair = load_pair<kLanes>(key);
            near[lane] = pair.first;
            far[lane] = pair.second;
          }
        }
        store_turned(near, turned_ + i / kPack * kKeys + begin);
        if constexpr (!kDots) store_turned(far, turned_ + (i + kLanes) * kKeys + begin);
      }
    }
  }
  MAINSTEM_INLINE void store_turned(Floats* block, float* to) {
    transpose<kLanes>(block);
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane)
      store<kLanes>(to + lane * kKeys, block[lane]);
  }

  // Pairs each number of a value with that of the next position.
  MAINSTEM_INLINE void pair_values(Range seen) {
    if constexpr (kTiles) seen = {0, kKeys};  // those that nobody sees are zeros
    for (std::int32_t key = seen.begin / 2 * 2; key < seen.end; key += 2)
      for (std::size_t i = 0; i < value_numbers_; i += kBoth) {
        const auto pair =
            paired<kLanes>(value_rows_[key] + i, value_rows_[key + 1] + i, std::make_index_sequence<kBoth>{});
        float* const to = pairs_ + key / 2 * value_numbers_ + i;
        std::memcpy(to, &pair.first, sizeof pair.first);
        std::memcpy(to + kLanes, &pair.second, sizeof pair.second);
      }
  }

  // Computes the scores of some queries.
  template <int kCount>
  MAINSTEM_INLINE void score(std::size_t q) {
    Floats total[kCount][kWide] = {};
    const float* query = queries_ + q * key_words_;
    for (std::size_t i = 0; i < key_words_; ++i) {
      Floats keys[kWide];
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        keys[part] = load<Floats>(turned_ + i * kKeys + part * kLanes);
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
        for (int part = 0; part < kWide; ++part)
          total[n][part] = plus_product(total[n][part], keys[part], query + n * key_words_ + i);
    }
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        store<kLanes>(weights_ + n * kKeys + part * kLanes, total[n][part]);
  }

  // The same for 16 queries: 16 keys are a tile of sums. Queries lie as a first factor does, keys as a second one.
  template <class Meanwhile>
  MAINSTEM_INLINE void score_by_tiles(const Group& group, const Meanwhile& meanwhile) {
    if (group.query >= count_) return;
    const TileRows queries{queries_ + group.query * key_words_, key_words_ * sizeof(float)};
    sum_of_tiles<4>(nullptr, queries, {turned_, kKeys * sizeof(float)}, key_words_ / kTileRows,
                    {group.weights, kKeys * sizeof(float)}, meanwhile);
  }

  // Adds the weighted values of 16 queries to their results.
  template <class Meanwhile>
  MAINSTEM_INLINE void add_by_tiles(const Group& group, const Meanwhile& meanwhile) {
    const std::size_t row = value_numbers_ * sizeof(float);
    for (std::size_t column = 0; column < value_numbers_; column += 4 * kTileRows) {
      float* const results = results_ + group.query * value_numbers_ + column;
      const float* const begin = group.first ? nullptr : results;
      const TileRows weights{group.weights, kKeys * sizeof(float)}, values{pairs_ + column, row};
      const std::size_t steps = kKeys / kTileNumbers;
      if (column + 4 * kTileRows <= value_numbers_)
        sum_of_tiles<4>(begin, weights, values, steps, {results, row}, meanwhile);
      else
        sum_of_tiles<2>(begin, weights, values, steps, {results, row}, meanwhile);
    }
  }

  // Returns total + numbers * factor, or with the two products of pairs.
  MAINSTEM_INLINE Floats plus_product(Floats total, Floats numbers, const float* factor) const {
    if constexpr (kDots)
      return dots<kLanes>(total, load<Words>(&numbers), Words{} + load<std::uint32_t>(factor));
    else
      return total + numbers * *factor;
  }

  // Makes weights of the scores of a query, relative to the highest so far; keys that it does not see have none.
  MAINSTEM_INLINE void weigh(std::size_t q, float* weights, Range seen) {
    if (seen.end <= seen.begin) {
      std::fill_n(weights, kKeys, 0.0f);
      return;
    }
    Floats scores[kWide];
#pragma GCC unroll 4
    for (int part = 0; part < kWide; ++part)
      scores[part] = load<Floats>(weights + part * kLanes);
    if (block_.scores.softcap > 0) {
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        scores[part] = capped<kLanes>(scores[part] * block_.scores.scale, block_.scores.softcap) * kLog2e;
    } else {
      const float scale = block_.scores.scale * kLog2e;
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        scores[part] *= scale;
    }
    if (seen.end - seen.begin < kKeys) {
      const Floats unseen = Floats{} - std::numeric_limits<float>::infinity();
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part) {
        // One comparison: GCC 12 takes an `and` of two apart, lane by lane.
        const auto after = Words(numbered<kLanes>() + (part * kLanes - seen.begin));
        scores[part] = after < static_cast<std::uint32_t>(seen.end - seen.begin) ? scores[part] : unseen;
      }
    }
    Floats high[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      high[half] = larger_of<kLanes>(scores[half], scores[half + 2]);
    Sum& sum = sums_[q];
    const float highest = std::max(sum.highest, highest_of<kLanes>(larger_of<kLanes>(high[0], high[1])));
#pragma GCC unroll 4
    for (int part = 0; part < kWide; ++part)
      scores[part] = power_of_two<kLanes>(scores[part] - highest);
    const Floats added = store_weights(scores, weights);
    float* const total = totals_ + q * kLanes;
    const float before = sum.highest;
    sum.highest = highest;
    if (before == kLowest) {
      store<kLanes>(total, added);
    } else if (before == highest) {
      store<kLanes>(total, load<Floats>(total) + added);
    } else {
      const float kept = power_of_two<kLanes>(before - highest);
      store<kLanes>(total, load<Floats>(total) * kept + added);
      float* result = results_ + q * value_numbers_;
      for (std::size_t i = 0; i < value_numbers_; i += kLanes)
        store<kLanes>(result + i, load<Floats>(result + i) * kept);
    }
  }

  // Writes weights as the product with values takes them; returns their sum, lane by lane.
  MAINSTEM_INLINE Floats store_weights(const Floats* scores, float* weights) const {
    if constexpr (kDots) {
      Floats total = {};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Words pairs = packed<kLanes>(scores[2 * half], scores[2 * half + 1]);
        std::memcpy(weights + half * kLanes, &pairs, sizeof pairs);
        total = dots<kLanes>(total, pairs, Words{} + 0x3f803f80u);  // ones
      }
      return total;
    } else {
#pragma GCC unroll 4
      for (int part = 0; part < kWide; ++part)
        store<kLanes>(weights + part * kLanes, scores[part]);
      return (scores[0] + scores[1]) + (scores[2] + scores[3]);
    }
  }

  // Adds kWidth vectors of the weighted values to the results of kCount queries.
  template <int kWidth, int kCount>
  MAINSTEM_INLINE void add(std::size_t q, std::size_t column, Range seen, bool first) {
    float* results = results_ + q * value_numbers_ + column;
    Floats total[kCount][kWidth] = {};
    if (!first)
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
        for (int part = 0; part < kWidth; ++part)
          total[n][part] = load<Floats>(results + n * value_numbers_ + part * kLanes);
    const std::size_t end = (seen.end + kPack - 1) / kPack;
    for (std::size_t key = seen.begin / kPack; key < end; ++key) {
      Floats values[kWidth];
#pragma GCC unroll 2
      for (int part = 0; part < kWidth; part += 2) {
        if constexpr (kDots) {
          values[part] = load<Floats>(pairs_ + key * value_numbers_ + column + part * kLanes);
          values[part + 1] = load<Floats>(pairs_ + key * value_numbers_ + column + (part + 1) * kLanes);
        } else {
          const auto pair = load_pair<kLanes>(value_rows_[key] + column + part * kLanes);
          values[part] = pair.first;
          values[part + 1] = pair.second;
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
        for (int part = 0; part < kWidth; ++part)
          total[n][part] = plus_product(total[n][part], values[part], weights_ + n * kKeys + key);
    }
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n)
#pragma GCC unroll 4
      for (int part = 0; part < kWidth; ++part)
        store<kLanes>(results + n * value_numbers_ + part * kLanes, total[n][part]);
  }

  const Block<Number>& block_;
  const Rows<kLanes, Number> keys_, values_;
  const Merge merge_;
  const std::size_t count_;          // of queries
  const std::size_t rows_;           // that they have in memory
  const std::size_t key_words_;      // of four bytes in a key
  const std::size_t value_numbers_;  // with padding
  float* queries_;                   // [count, key_words]
  float* turned_;                    // the keys, [key_words, kKeys]
  float* pairs_;                     // the values, [kKeys / 2, value_numbers]
  float* weights_;                   // of some queries, [kTurns, kQueries, kKeys], first the scores
  Number *staged_keys_, *staged_values_;
  const Number* zeros_;
  float *results_, *merged_;  // of a span, and of those before it: [count, value_numbers]
  Sum *sums_, *merged_sums_;  // [count]
  float* totals_;             // of weights, [count, kLanes]: their lanes are added up after the span
  Range* seen_;               // [count]
  const Number *key_rows_[kKeys], *value_rows_[kKeys];
};

}  // namespace mainstem
