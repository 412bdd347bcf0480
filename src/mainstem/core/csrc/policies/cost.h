// Cost of computing a page again, in units of the first page of a prompt. In a transformer of width d, a token at
// position p needs 24 d^2 floating-point operations per layer in the matrices, and 4 p d in attention (Kaplan et al.
// 2020, arXiv:2001.08361, table 1): both are equal at p = 6 d, which is 24,576 for d = 4,096.
#pragma once

#include "../replacement.h"

namespace mainstem {

inline constexpr double kDoubledAt = 24576;   // tokens
inline constexpr double kStateTokens = 4096;  // the state of a hybrid is about as large as the KV of this many tokens

// The average over the pages of a node.
inline double page_cost(const Node& node, const Surroundings& around) {
  return 1 + around.page_tokens * (node.start + node.pages * 0.5) / kDoubledAt;
}

// Floating-point operations saved per byte, in the same units; a hybrid also keeps a state for a node.
inline double saved_per_byte(const Node& node, const Surroundings& around) {
  const double tokens = node.pages * around.page_tokens;
  return page_cost(node, around) * tokens / (tokens + (around.has_states ? kStateTokens : 0));
}

}  // namespace mainstem
