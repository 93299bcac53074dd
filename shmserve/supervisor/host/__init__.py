"""The server on its host: listening sockets, the run directory, the log file, the terminal, the
service manager, the connection to a server that takes the place of another."""
