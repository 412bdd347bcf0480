"""Models, KV tensors, attention, sampling, scheduler and engine: what turns leases into tokens."""
