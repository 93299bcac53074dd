"""Local clients: programs on this host that use shmserve.client, and the memory they share.

server.py        the protocol, and the shared memory: start reading here
connections.py   the sockets of clients, and quotas on them
"""
