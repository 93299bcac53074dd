"""Processes that the server always has, started again when they die: gateways, and holders of
workspaces."""
