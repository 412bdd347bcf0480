// Named cases that random operations do not come to: what is refused, what check() finds, ranks from outside.
#pragma once

namespace mainstem {

void run_cases();  // throws a Failure

}  // namespace mainstem
