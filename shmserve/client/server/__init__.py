"""The server as a client knows it.

discovery.py      where it is
state.py          what it has told: models, losses, and who is to hear of them
"""
