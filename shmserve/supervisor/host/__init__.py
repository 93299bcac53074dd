"""The server on its host: listening sockets, the run directory, the log file, the terminal, the
service manager."""
