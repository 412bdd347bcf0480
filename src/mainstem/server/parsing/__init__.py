"""Calls and thoughts in what a model writes."""
