"""Models of transformers: loaded, changed, laid out over pages and run."""
