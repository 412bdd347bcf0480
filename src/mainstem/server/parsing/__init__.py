"""Calls and reasoning in the output of a model."""
