"""Batching: batchers decide what runs next, for the dispatchers in instances/dispatch.py."""
