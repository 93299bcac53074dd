"""The process table: zygotes, the control socket, restarts with a backoff."""
