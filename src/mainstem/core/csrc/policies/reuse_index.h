// Reuse index: how much a page is worth that was used last so long ago, learned for each kind of page.
//
// Ages lie in buckets, two an octave. Of each kind and bucket are counted the reuses and the time that pages spent in
// it without one: their ratio is the hazard, the chance of a reuse in that bucket. The index is that of Gittins
// ("Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B, 1979): over all horizons, the best ratio of
// the chance of a reuse to the time that the page must be held for it. Beckmann, Chen and Cidon ("LHD", NSDI 2018) rank
// by the ratio over the whole of a page's life, which does not see that something may be worth holding for a little
// while.
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
  static constexpr int kGroups = 8, kKindsInGroup = 6;  // similar kinds stand in one group
  static constexpr int kKinds = kGroups * kKindsInGroup;

  ReuseIndex() { work_out(kLeastPrior); }

  float at(int kind, int bucket) const { return index_[cell(kind, bucket)]; }
  double reuses() const { return reuses_; }

  void reused(int kind, std::uint32_t age) {
    reused_[cell(kind, ages::bucket(age))] += 1;
    ++reuses_;
  }
  // A page of that kind came from one age to another without being used.
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

  // Works the index out from what was counted, and lets it fade. `alike` pages are counted for each request: they
  // share one fate, so that what is known beforehand weighs as much as so many more.
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
  static constexpr double kYoungest = 0.01;  // the hazard in the first bucket before anything is known
  static constexpr double kKept = 0.99;      // of the counts, at each lesson
  static constexpr double kFar = 10;         // a group's hazard follows that of all this far
  static constexpr double kMost = 0.95;
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

  // With thin data a kind is taken to be as its group, that as all pages, and an older bucket as the younger one: the
  // same hazard in each of these buckets falls as 1 / age, which is the order of LRU.
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

  // Some buckets in a row: for a page at their beginning, the chance that it is used in them, for how long it is held,
  // and the chance that it comes through. Counted from there, all is exact however few pages come so far.
  struct PathSpan {
    double chance, held, through;
    double slope() const { return chance / held; }
    PathSpan with(const PathSpan& next) const {
      return {chance + through * next.chance, held + through * next.held, through * next.through};
    }
  };

  // For each bucket the steepest chord to a later one, of the curve of reuse chances over time held: the upper hull
  // from the right.
  static void rank(const Hazards& hazards, float* index) {
    std::array<PathSpan, kBuckets> hull;
    int top = 0;
    for (int a = kBuckets - 1; a >= 0; --a) {
      const double h = std::min(kMost, hazards[a] / (1 + hazards[a] / 2));
      PathSpan best{h, ages::width(a) * (1 - h / 2), 1 - h};
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
