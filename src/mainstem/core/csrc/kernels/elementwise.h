// Functions of single numbers: activations and gates, where PyTorch's have other bits at the end of a thread's share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/vectors.h"

namespace mainstem {

enum class Function : std::uint8_t { kSilu, kGeluTanh, kGelu, kSigmoid, kSoftplus };

// out = function(x), [count], rounded once. The bits of a result depend on its number alone.
template <class Number>
void apply(Function function, const Number* x, Number* out, std::size_t count, unsigned threads);

}  // namespace mainstem
