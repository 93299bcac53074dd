"""Batching policies as pure functions: the queue and the time in, a batch or a wait out."""
