"""Rules that take out of a prompt what changes with every request, so that the prompt stays in the cache."""
