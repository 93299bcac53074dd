"""The tests: unit (pure), integration (real servers and clients), faults (of a real server)."""
