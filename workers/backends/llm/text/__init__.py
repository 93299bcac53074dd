"""Requests and responses, in a thread of their own."""
