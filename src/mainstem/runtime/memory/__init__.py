"""The memory that page ids name: tensors of keys and values, states, host memory, and copies between them."""
