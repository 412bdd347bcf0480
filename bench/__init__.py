"""Benchmarks: the index against its peers, the time to the first token, and throughput. See README.md.

Not part of the package. Run it from the repository root with `python -m bench`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # some use the servers of the tests
