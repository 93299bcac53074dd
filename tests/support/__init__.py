"""Helpers for tests of whole servers: servers, clients, loads, and the leak guard."""
