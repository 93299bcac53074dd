"""The HTTP front door: a request comes in, an answer goes out."""
