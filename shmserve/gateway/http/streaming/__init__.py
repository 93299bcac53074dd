"""Responses that come one after the other, to one request over HTTP."""
