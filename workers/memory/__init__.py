"""A worker's memory: outputs in its arena, device memory, copies."""
