"""Watching servers from outside, by what they publish: `mainstem top`."""
