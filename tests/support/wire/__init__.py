"""Clients that speak a protocol as the tests need it: HTTP, frames of HTTP/2, calls of gRPC."""
