"""The connection of the server to its host: sockets, run directory, console, service manager."""
