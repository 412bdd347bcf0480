"""Models of the cache for the model checker SPIN, and the runner that checks them exhaustively."""
