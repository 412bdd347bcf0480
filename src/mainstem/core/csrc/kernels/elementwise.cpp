#include "kernels/elementwise.h"

#include "kernels/functions.h"
#include "kernels/parallel.h"

namespace mainstem {

namespace {

template <int kLanes, Function kFunction>
MAINSTEM_INLINE typename Lanes<kLanes>::Floats result_of(typename Lanes<kLanes>::Floats x) {
  if constexpr (kFunction == Function::kSilu) return silu<kLanes>(x);
  if constexpr (kFunction == Function::kGeluTanh) return gelu_tanh<kLanes>(x);
  if constexpr (kFunction == Function::kGelu) return gelu<kLanes>(x);
  if constexpr (kFunction == Function::kSigmoid) return sigmoid<kLanes>(x);
  if constexpr (kFunction == Function::kSoftplus) return softplus<kLanes>(x);
}

template <int kLanes, Function kFunction, class Number>
MAINSTEM_INLINE void apply_to(const Number* x, Number* out, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes)
    store_first<kLanes>(out + i, result_of<kLanes, kFunction>(load_first<kLanes>(x + i, count - i)), count - i);
}

template <Function kFunction, class Number>
MAINSTEM_AVX512 void on_avx512(const Number* x, Number* out, std::size_t count) {
  apply_to<16, kFunction>(x, out, count);
}

template <Function kFunction, class Number>
MAINSTEM_AVX2 void on_avx2(const Number* x, Number* out, std::size_t count) {
  apply_to<8, kFunction>(x, out, count);
}

template <Function kFunction, class Number>
void on_any(const Number* x, Number* out, std::size_t count) {
  apply_to<8, kFunction>(x, out, count);
}

template <Function kFunction, class Number>
void share(const Number* x, Number* out, std::size_t count, unsigned threads) {
  const auto isa = best_isa();
  const auto run = isa == Isa::kAvx512 ? on_avx512<kFunction, Number>
                   : isa == Isa::kAvx2 ? on_avx2<kFunction, Number>
                                       : on_any<kFunction, Number>;
  constexpr std::size_t kPart = 512;  // numbers
  const std::size_t parts = (count + kPart - 1) / kPart;
  share_rows(parts, kPart, threads, [&](std::size_t begin, std::size_t end) {
    run(x + begin * kPart, out + begin * kPart, std::min(count, end * kPart) - begin * kPart);
  });
}

}  // namespace

template <class Number>
void apply(Function function, const Number* x, Number* out, std::size_t count, unsigned threads) {
  switch (function) {
    case Function::kSilu:
      return share<Function::kSilu>(x, out, count, threads);
    case Function::kGeluTanh:
      return share<Function::kGeluTanh>(x, out, count, threads);
    case Function::kGelu:
      return share<Function::kGelu>(x, out, count, threads);
    case Function::kSigmoid:
      return share<Function::kSigmoid>(x, out, count, threads);
    case Function::kSoftplus:
      return share<Function::kSoftplus>(x, out, count, threads);
  }
}

template void apply(Function, const float*, float*, std::size_t, unsigned);
template void apply(Function, const BFloat16*, BFloat16*, std::size_t, unsigned);

}  // namespace mainstem
