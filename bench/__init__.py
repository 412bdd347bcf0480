"""Benchmarks: the index against its peers, the time to the first token, and throughput. See README.md.

Nothing here is part of the package; run it from the repository root with `python -m bench`.
"""
