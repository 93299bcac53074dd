"""JSON of requests: parsed within limits, checked, and turned into tensors."""
