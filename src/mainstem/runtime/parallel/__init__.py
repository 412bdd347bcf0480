"""One model in one process or in several ranks."""
