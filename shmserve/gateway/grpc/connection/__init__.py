"""The connections of a gRPC listener.

protocol.py    bytes to and from the HTTP/2 engine, its events to calls, patience with slow clients
lifetime.py    pings, age, drain
tls_layer.py   TLS

How many there may be, and which idle ones are evicted: gateway/connection_limits.py.
"""
