"""Batching: batchers decide what runs next, and dispatchers execute these decisions."""
