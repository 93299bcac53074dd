"""What a request costs each process: calls, allocations and system calls."""
