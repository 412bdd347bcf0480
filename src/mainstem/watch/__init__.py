"""Servers seen from outside: `mainstem top`, `lint` and `explain`."""
