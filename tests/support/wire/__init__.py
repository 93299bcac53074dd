"""Low-level clients for tests: HTTP, HTTP/2 frames, gRPC calls."""
