// check(): verifies every structural rule from scratch. Slow on purpose.
#include "tree/tree.h"

namespace mainstem {

void Tree::check() const {
  for (Index node = 1; node < nodes_.nodes().size(); ++node) {
    if (!nodes_[node].live) continue;
    nodes_.check_node(node);
    cells_.check_node(node);
    eviction_.check_node(node);
  }
  nodes_.check();
  cells_.check();
  eviction_.check();
}

}  // namespace mainstem
