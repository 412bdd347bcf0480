"""Replay: runs a trace of requests through a cache of each size and policy."""
