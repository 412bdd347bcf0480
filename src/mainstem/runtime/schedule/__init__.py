"""Which request computes what in the next step, and what is counted of it."""
