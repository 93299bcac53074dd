"""The load generators: a process each, and the same for both servers."""
