"""The runtime turns leases into tokens: models, KV tensors, attention, sampling, scheduler and engine."""
