"""Streaming over HTTP: any number of responses to one request."""
