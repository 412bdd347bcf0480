// FLOP-aware: recency plus floating-point operations saved per byte, each on a scale of its own. Pan et al., "Marconi:
// prefix caching for the era of hybrid LLMs", MLSys 2025 (arXiv:2411.19379). There both are normalised over all
// nodes at each eviction; here when a node is used: the largest saving counts as much as the time from use to eviction.
#pragma once

#include "eviction/policies/cost.h"

namespace mainstem {

struct FlopAwareRecord : InQueue {
  double score = 0;
  bool operator==(const FlopAwareRecord&) const = default;
};

class FlopAware final : public Remembering<FlopAwareRecord> {
 public:
  using Remembering::Remembering;
  Place place(Index index, std::uint64_t accessed) const override {
    return {{records_[index].score, number(accessed)}};
  }

  void came(Index index) noexcept override {
    enter(index, {});
    used(index);
  }
  void used(Index index) noexcept override {
    const double saved = saved_per_byte(node(index), around_);
    largest_ = std::max(saved, largest_ * kFading);
    records_[index].score = number(around_.tick) + kWeight * age_ * saved / largest_;
  }
  void gone(Index index, std::uint32_t pages) noexcept override {
    Remembering::gone(index, pages);
    age_ = number(around_.tick - node(index).accessed);
  }

 private:
  static constexpr double kWeight = 1;               // alpha in the paper
  static constexpr double kFading = 1 - 1.0 / 4096;  // per use, so that one outlier is forgotten

  double largest_ = 0, age_ = 0;
};

}  // namespace mainstem
