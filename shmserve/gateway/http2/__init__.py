"""HTTP/2 for servers (RFC 9113), without IO: bytes in, events out.

    frames.py           the layout of frames, error codes, settings
    header_blocks.py    header blocks to a request's head and back (HPACK)
    incoming.py         frames out of bytes, and the events for those who handle streams
    connection.py       a connection: frames to events, states of streams, flow control inwards
    outgoing.py         what is sent: frames within the windows that the client gives
    limits.py           budgets of what costs us more than a client

`Http2Connection.receive` returns the events `Begun`, `Data`, `StreamReset` and `PingAnswered`. A
server responds with `sending.head`, `sending.data` and `sending.trailers`, or with all three at
once (`sending.respond`). It ends a stream early with `reset`, and permits more data of a stream
with `send_window_update`. The gRPC gateway uses all of this package; the gRPC
client in protocols/grpc.py uses its frames and header blocks.
"""
