"""Process management: the process table, zygotes, the control socket, restart backoff."""
