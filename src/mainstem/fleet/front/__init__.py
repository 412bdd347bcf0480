"""The front of a fleet: one address for many engines."""
