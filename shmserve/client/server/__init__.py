"""The server as a client knows it.

discovery.py      where it is
state.py          what it has told: losses, and who is to hear of them
models.py         what it has told: the models
"""
