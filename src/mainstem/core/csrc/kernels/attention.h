// Attention of few queries to keys and values in pages, read where they lie.
//
// A part is keys that some rows of a batch see: a prefix that requests share, or what one of them has alone. Its keys
// are read once for all of its rows, and for all query heads that share a KV head. A part is cut into units of some
// keys, which threads take one by one. A unit has partial results, each with the sum of its weights and the maximum of
// its scores; those of a row are merged at the end (online softmax: arXiv 1805.02867; one prefix for many: arXiv
// 2402.05099).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/scratch.h"
#include "kernels/vectors.h"

namespace mainstem {

// Keys [begin, end) of a part.
struct Range {
  std::int32_t begin, end;
};

// Keys and values of a layer: position `slot` of KV head h has its key at keys + slot * key_stride + h * key_numbers,
// in numbers, and its value likewise.
template <class Number>
struct KeysAndValues {
  const Number* keys;
  const Number* values;
  std::size_t key_stride, value_stride;
};

// What layers of one kind have in common. Numbers of keys and values are multiples of kHeadStep.
struct Heads {
  std::size_t heads, kv_heads, key_numbers, value_numbers;
};

inline constexpr std::size_t kHeadStep = 32;

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
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> rows;
    std::vector<Range> seen;  // by row, which of `slots`
  };

  // Every row below `rows` must see a key.
  AttentionPlan(std::vector<Part> parts, std::size_t rows);

  std::size_t rows() const { return starts_.size() - 1; }
  // The slots are below it.
  std::int64_t end() const { return end_; }

  // Computes out [rows, heads, value_numbers] of queries [rows, heads, key_numbers].
  template <class Number>
  void attend(const Number* queries, const KeysAndValues<Number>& given, const Heads& heads,
              const Scores<Number>& scores, Number* out, unsigned threads);

 private:
  struct Unit {
    std::size_t part;
    Range keys;
    std::size_t place;  // of the first of its partial results
  };

  std::vector<Part> parts_;
  std::vector<Unit> units_;
  std::vector<std::size_t> starts_, places_;  // the partial results of row r: places_[starts_[r]] up to starts_[r + 1]
  std::size_t partials_ = 0;                  // of one head
  std::int64_t end_ = 0;
  Scratch memory_;  // of the partial results, for all layers
};

}  // namespace mainstem
