"""The model: checkpoint, weights, and KV cache."""
