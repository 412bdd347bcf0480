#include "kernels/norm.h"

#include <cmath>

#include "kernels/functions.h"
#include "kernels/parallel.h"

namespace mainstem {

namespace {

// Where rows come from and go to.
template <class Given, class Number, class Result>
struct Norm {
  const Given* x;
  const Number* weight;
  Result* out;
  std::size_t width;
  NormRule rule;
};

template <int kLanes, class Given, class Number, class Result>
MAINSTEM_INLINE void norm_rows(const Norm<Given, Number, Result>& norm, std::size_t begin, std::size_t end) {
  using Floats = typename Lanes<kLanes>::Floats;
  for (std::size_t row = begin; row < end; ++row) {
    const Given* x = norm.x + row * norm.width;
    Result* out = norm.out + row * norm.width;
    Floats squares = {};
    for (std::size_t i = 0; i < norm.width; i += kLanes) {
      const Floats numbers = load_first<kLanes>(x + i, norm.width - i);
      squares += numbers * numbers;
    }
    const float mean = total_of<kLanes>(squares) / static_cast<float>(norm.width);
    const float factor = 1 / std::sqrt(mean + norm.rule.epsilon);
    for (std::size_t i = 0; i < norm.width; i += kLanes) {
      Floats scaled = load_first<kLanes>(x + i, norm.width - i) * factor;
      if (norm.rule.rounds) scaled = rounded<kLanes, Number>(scaled);
      const Floats gain = load_first<kLanes>(norm.weight + i, norm.width - i) + norm.rule.offset;
      store_first<kLanes>(out + i, scaled * gain, norm.width - i);
    }
  }
}

template <class... Numbers>
MAINSTEM_AVX512 void on_avx512(const Norm<Numbers...>& norm, std::size_t begin, std::size_t end) {
  norm_rows<16>(norm, begin, end);
}

template <class... Numbers>
MAINSTEM_AVX2 void on_avx2(const Norm<Numbers...>& norm, std::size_t begin, std::size_t end) {
  norm_rows<8>(norm, begin, end);
}

template <class... Numbers>
void on_any(const Norm<Numbers...>& norm, std::size_t begin, std::size_t end) {
  norm_rows<8>(norm, begin, end);
}

}  // namespace

template <class Given, class Number, class Result>
void rms_norm(const Given* x, const Number* weight, Result* out, std::size_t rows, std::size_t width,
              const NormRule& rule, unsigned threads) {
  const Norm<Given, Number, Result> norm{x, weight, out, width, rule};
  const auto isa = best_isa();
  const auto run = isa == Isa::kAvx512 ? on_avx512<Given, Number, Result>
                   : isa == Isa::kAvx2 ? on_avx2<Given, Number, Result>
                                       : on_any<Given, Number, Result>;
  share_rows(rows, width, threads, [&](std::size_t begin, std::size_t end) { run(norm, begin, end); });
}

template void rms_norm(const float*, const float*, float*, std::size_t, std::size_t, const NormRule&, unsigned);
template void rms_norm(const BFloat16*, const BFloat16*, BFloat16*, std::size_t, std::size_t, const NormRule&,
                       unsigned);
template void rms_norm(const float*, const BFloat16*, BFloat16*, std::size_t, std::size_t, const NormRule&, unsigned);
template void rms_norm(const float*, const BFloat16*, float*, std::size_t, std::size_t, const NormRule&, unsigned);

}  // namespace mainstem
