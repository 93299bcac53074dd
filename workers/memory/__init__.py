"""The memory of a worker: outputs in its arena, device memory, tensors, static plans."""
