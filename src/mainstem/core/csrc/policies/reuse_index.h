// Reuse index: how much a page is worth by the time since its last use, learned for each kind of page.
//
// Ages are grouped in buckets, two per octave. For each kind and bucket, it counts the reuses and the time that pages
// spent there without one: their ratio is the hazard, the chance of a reuse in that bucket. The index is that of
// Gittins
// ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B, 1979): over all horizons, the best ratio of
// the chance of a reuse to the time that the page must be held for it. Beckmann, Chen and Cidon ("LHD", NSDI 2018) rank
// by the ratio over a page's whole life, which misses that a page may be worth holding for a short while.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace mainstem {

namespace ages {

inline constexpr int kBuckets = 40;
inline constexpr std::uint32_t kFirst = 16;  // ages below this are one bucket

inline int bucket(std::uint32_t age) {
  if (age < kFirst) return 0;
  const int octave = static_cast<int>(std::bit_width(age)) - 1;
  return std::min(kBuckets - 1, 1 + (octave - 4) * 2 + static_cast<int>(age >> (octave - 1) & 1));
}
inline constexpr std::uint32_t begin(int bucket) {
  if (bucket == 0) return 0;
  const int octave = 4 + (bucket - 1) / 2;
  return (1u << octave) + (static_cast<std::uint32_t>((bucket - 1) & 1) << (octave - 1));
}
inline constexpr double width(int bucket) {
  return static_cast<double>(begin(bucket + 1) - begin(bucket));
}

}  // namespace ages

class ReuseIndex {
 public:
  static constexpr int kGroups = 8, kKindsInGroup = 6;  // similar kinds form a group
  static constexpr int kKinds = kGroups * kKindsInGroup;

  ReuseIndex() { work_out(kLeastPrior); }

  float at(int kind, int bucket) const { return index_[cell(kind, bucket)]; }
  double reuses() const { return reuses_; }

  void reused(int kind, std::uint32_t age) {
    reused_[cell(kind, ages::bucket(age))] += 1;
    ++reuses_;
  }
  // A page of that kind went from one age to another without being used.
  void lived(int kind, std::uint32_t from, std::uint32_t to) {
    if (to <= from) return;
    double* const lived = &lived_[cell(kind, 0)];
    const int first = ages::bucket(from), last = ages::bucket(to);
    if (first == last) {
      lived[first] += (to - from) / ages::width(first);
      return;
    }
    lived[first] += (ages::begin(first + 1) - from) / ages::width(first);
    for (int bucket = first + 1; bucket < last; ++bucket)
      lived[bucket] += 1;
    lived[last] += (to - ages::begin(last)) / ages::width(last);
  }

  // Computes the index from the counts, and fades them. Each request counts `alike` pages, which share one fate: the
  // prior weighs that many times more.
  void learn(double alike) {
    work_out(std::max(kLeastPrior, kPriorRequests * alike));
    for (double& each : reused_)
      each *= kKept;
    for (double& each : lived_)
      each *= kKept;
  }
  static bool enough(double reuses, double alike) {
    return reuses >= 2 * std::max(kLeastPrior, kPriorRequests * alike);
  }

 private:
  static constexpr int kBuckets = ages::kBuckets;
  static constexpr double kPriorRequests = 50, kLeastPrior = 50;
  static constexpr double kYoungest = 0.01;  // the prior hazard in the first bucket
  static constexpr double kKept = 0.99;      // part of the counts kept at each lesson
  static constexpr double kFar = 10;         // limits a group's hazard relative to that of all pages
  static constexpr double kMaxHazard = 0.95;
  using Hazards = std::array<double, kBuckets>;

  static constexpr std::size_t cell(int kind, int bucket) {
    return static_cast<std::size_t>(kind) * kBuckets + static_cast<std::size_t>(bucket);
  }
  struct Counted {
    double reused = 0, lived = 0;
  };
  Counted counted(int kind, int kinds, int bucket) const {
    Counted sum;
    for (int each = kind; each < kind + kinds; ++each) {
      sum.reused += reused_[cell(each, bucket)];
      sum.lived += lived_[cell(each, bucket)];
    }
    return sum;
  }
  static double blend(Counted counted, double prior, double expected) {
    return (counted.reused + prior * expected) / (counted.lived + prior);
  }

  // With little data a kind is assumed to be like its group, a group like all pages, and an older bucket like the
  // younger one: the same hazard in each of these buckets falls as 1 / age, which is the order of LRU.
  void work_out(double prior) {
    Hazards all, group;
    for (int a = 0; a < kBuckets; ++a)
      all[a] = blend(counted(0, kKinds, a), prior, a ? all[a - 1] : kYoungest);
    for (int kind = 0; kind < kKinds; ++kind) {
      if (kind % kKindsInGroup == 0)
        for (int a = 0; a < kBuckets; ++a) {
          const double ratio = a ? std::clamp(group[a - 1] / all[a - 1], 1 / kFar, kFar) : 1;
          group[a] = blend(counted(kind, kKindsInGroup, a), prior, all[a] * ratio);
        }
      Hazards hazards;
      for (int a = 0; a < kBuckets; ++a)
        hazards[a] = blend(counted(kind, 1, a), prior, group[a]);
      rank(hazards, &index_[cell(kind, 0)]);
    }
  }

  // Consecutive buckets: for a page at their beginning, the chance of a use in them, the time that it is held, and the
  // chance to get through. Relative to that page, all three are exact however few pages get there.
  struct Buckets {
    double chance, held, through;
    double slope() const { return chance / held; }
    Buckets with(const Buckets& next) const {
      return {chance + through * next.chance, held + through * next.held, through * next.through};
    }
  };

  // Finds for each bucket the steepest chord to a later one, on the curve of reuse chance over time held: the upper
  // hull from the right.
  static void rank(const Hazards& hazards, float* index) {
    std::array<Buckets, kBuckets> hull;
    int top = 0;
    for (int a = kBuckets - 1; a >= 0; --a) {
      const double h = std::min(kMaxHazard, hazards[a] / (1 + hazards[a] / 2));
      Buckets best{h, ages::width(a) * (1 - h / 2), 1 - h};
      while (top > 0 && hull[top - 1].slope() >= best.slope())
        best = best.with(hull[--top]);
      index[a] = static_cast<float>(best.slope());
      hull[top++] = best;
    }
  }

  std::array<double, kKinds * kBuckets> reused_{}, lived_{};
  std::array<float, kKinds * kBuckets> index_{};
  double reuses_ = 0;
};

}  // namespace mainstem
