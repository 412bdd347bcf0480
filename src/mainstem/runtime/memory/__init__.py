"""The memory behind page ids: tensors of keys and values, states, host memory, and copies between them."""
