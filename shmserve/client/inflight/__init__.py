"""Requests on their way: by which sockets, and what becomes of them."""
