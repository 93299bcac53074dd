"""The server's events, for whoever listens."""
