"""The cases of the benchmark: loads, streams, the native client, and one server without load."""
