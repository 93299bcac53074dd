"""HTTP/2 for servers (RFC 9113), without IO: bytes in, events out.

    frames.py           the layout of frames, error codes, settings
    header_blocks.py    header blocks to a request's head and back (HPACK)
    incoming.py         frames out of bytes, and the events for those who handle streams
    connection.py       a connection: frames to events, states of streams, flow control inwards
    outgoing.py         what is sent: frames within the windows that the client gives
    limits.py           budgets of what costs us more than a client

The seam to what is spoken on top is narrow. Events: `Begun`, `Data`, `Cancelled`. Methods:
`send_head`, `send_data`, `end`, `respond` (the three at once), `reset`, and `grant` for more of a
stream's data. Nothing but gRPC uses it.
"""
