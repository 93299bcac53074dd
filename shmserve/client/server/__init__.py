"""The server from the client's point of view.

discovery.py      the server's run directory
state.py          the published state: models, losses, and the channels to wake
"""
