"""What the server takes of its host: sockets to listen on, the run directory, the log file."""
