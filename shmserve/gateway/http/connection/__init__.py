"""The connections of an HTTP listener.

aiohttp_parts.py   the parser, and the streams that bodies are in
flow_control.py    back-pressure, both ways
incoming.py        bytes -> requests that wait for their turn; who is too slow with them
protocol.py        a connection, and its requests one after the other
limits.py          how many there may be, and who makes room
"""
