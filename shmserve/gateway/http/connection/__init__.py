"""The connections of an HTTP listener.

incoming.py        bytes -> the queue of requests; timeouts for heads and bodies; back-pressure
protocol.py        a connection, whose requests are handled in order

gateway/connection_limits.py limits the number of connections and evicts idle connections.
"""
