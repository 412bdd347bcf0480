"""Metrics, traces, recordings, explanations and the live page of a server."""
