"""Replay: what a cache of each size and policy would have done with a trace of requests."""
