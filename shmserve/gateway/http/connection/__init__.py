"""The connections of an HTTP listener.

aiohttp_parts.py   the parser, and the streams that bodies are in
incoming.py        bytes -> the queue of requests; timeouts for heads and bodies; back-pressure
protocol.py        a connection, and its requests one after the other

How many there may be, and which idle ones are evicted: gateway/connection_limits.py.
"""
