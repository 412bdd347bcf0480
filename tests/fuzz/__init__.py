"""Fuzzing: what comes from outside, and the core's calls, driven by bytes that a coverage-guided fuzzer makes."""
