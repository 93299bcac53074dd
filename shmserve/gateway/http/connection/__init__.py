"""The connections of an HTTP listener.

incoming.py        bytes -> the queue of requests; timeouts for heads and bodies; back-pressure
protocol.py        a connection, and its requests one after the other

gateway/connection_limits.py limits the number of connections and evicts idle connections.
"""
