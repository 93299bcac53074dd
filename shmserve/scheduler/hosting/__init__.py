"""The process that hosts schedulers: the loop, the sockets and the clock."""
