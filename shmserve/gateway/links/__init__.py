"""Links to schedulers and to the supervisor, and the table of requests in flight."""
