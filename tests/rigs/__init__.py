"""Parts of the server driven in the test's own process, and stand-ins for the others."""
