"""Simulation: replays a trace through real trees of each size and policy, and the bound that no policy passes."""
