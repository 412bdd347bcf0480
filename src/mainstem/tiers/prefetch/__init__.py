"""Prefetches: what storage has of a prompt is read before its request is scheduled."""
