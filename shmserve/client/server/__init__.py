"""The server as a client knows it.

discovery.py      where it is
listener_link.py  the link to its listener: what it tells, and what it is asked
state.py          what it has told: losses, and who is to hear of them
models.py         what it has told: the models
"""
