// Attention to keys and values in pages, read where they lie, for any number of queries.
//
// A part is keys at consecutive positions that some rows of a batch see: a prefix that requests share, or what one of
// them has alone. Its keys are read once for many of its rows, and for all query heads that share a KV head.
//
// What a row is does not depend on the others, nor on the parts that its keys are in, nor on threads. Its keys are cut
// into spans at absolute positions. Each span has a partial result, with the sum of its weights and its highest score;
// those of a row are merged in the order of positions (online softmax: arXiv 1805.02867; one prefix for many: arXiv
// 2402.05099). Many rows merge span after span, few leave all spans to threads and merge them at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/scratch.h"
#include "kernels/vectors.h"

namespace mainstem {

// Positions of keys, [begin, end).
struct Range {
  std::int32_t begin, end;
};

// How pages keep a number.
enum class Stored : std::uint8_t { kAsGiven, kInt8, kFloat8 };

// Keys and values of a layer: position `slot` of KV head h has its key at keys + slot * key_stride + h * key_numbers,
// in numbers, and its value likewise. Numbers of 8 bits are at the same addresses, in bytes, and are times the scale at
// slot * kv_heads + h.
template <class Number>
struct KeysAndValues {
  const Number* keys;
  const Number* values;
  std::size_t key_stride, value_stride;
  Stored stored = Stored::kAsGiven;
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
};

// What layers of one kind have in common.
struct Heads {
  std::size_t heads, kv_heads, key_numbers, value_numbers;

  std::size_t group() const { return heads / kv_heads; }
};

// How scores become weights.
template <class Number>
struct Scores {
  float scale;          // of a score
  float softcap;        // a score s becomes softcap * tanh(s / softcap); 0: it stays
  const Number* sinks;  // [heads] a score more, without a value; may be null
};

// Which rows of a batch see which keys: the same for all layers of a kind.
class AttentionPlan {
 public:
  struct Part {
    std::int32_t first;               // position of the first key
    std::vector<std::int64_t> slots;  // of keys at consecutive positions
    std::vector<std::int32_t> rows;
    std::vector<Range> seen;  // by row, at most the positions of `slots`
  };

  // Every row below `rows` must see a key, and none may see a position twice, nor those of a span in two parts.
  AttentionPlan(std::vector<Part> parts, std::size_t rows);

  std::size_t rows() const { return starts_.size() - 1; }
  // The slots are below it.
  std::int64_t end() const { return end_; }

  // Computes out [rows, heads, value_numbers] of queries [rows, heads, key_numbers].
  template <class Number>
  void attend(const Number* queries, const KeysAndValues<Number>& given, const Heads& heads,
              const Scores<Number>& scores, Number* out, unsigned threads);

 private:
  // Some rows of a part, [first, last), and the keys that any of them sees, or those of a span.
  struct Unit {
    std::size_t part, first, last;
    Range keys;
    std::size_t place;  // of the first of its partial results; kWhole: it has results

    std::size_t cost() const { return (last - first) * (keys.end - keys.begin); }
  };
  static constexpr std::size_t kWhole = -1;

  void add_spans(std::size_t number);
  void cut_blocks(std::size_t rows);
  Range seen_by(const Part& part, std::size_t first, std::size_t last) const;

  std::vector<Part> parts_;
  std::vector<std::size_t> whole_;  // parts of many rows, which see no other part
  std::size_t whole_rows_ = 0;
  std::vector<Unit> spans_, blocks_;          // units of the other parts, and of these
  std::size_t block_rows_ = 0;                // of a block
  std::vector<std::size_t> starts_, places_;  // the partial results of row r: places_[starts_[r]] up to starts_[r + 1]
  std::size_t partials_ = 0;                  // of one head
  std::int64_t end_ = 0;
  Scratch memory_;  // of the partial results, for all layers
};

}  // namespace mainstem
