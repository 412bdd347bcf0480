// Named cases that random operations do not reach: rejected arguments, faults that check() finds, external ranks.
#pragma once

namespace mainstem {

void run_cases();  // throws a Failure

}  // namespace mainstem
