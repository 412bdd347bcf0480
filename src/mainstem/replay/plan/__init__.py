"""Planning: what a model keeps of a prompt, what computing it costs, and what memory is worth buying."""
