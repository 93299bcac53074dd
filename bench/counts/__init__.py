"""The cost of a request in each process: calls, allocations and system calls."""
