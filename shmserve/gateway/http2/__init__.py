"""HTTP/2 for servers (RFC 9113) without IO: it converts received bytes to events.

    frames.py           the layout of frames, error codes, settings
    header_blocks.py    decoding and encoding of header blocks (HPACK)
    incoming.py         parsing of frames, their events, and budgets that bound the work which a
                        client can cause
    connection.py       a connection: stream states, inbound flow control
    outgoing.py         outbound frames within the client's flow-control windows

`Http2Connection.receive` returns the events `StreamOpened`, `Data`, `StreamReset` and
`PingAcknowledged`. A server responds with `sender.send_head`, `sender.send_data` and
`sender.send_trailers`, or with all three at once (`sender.send_response`). `reset` ends a stream
early, and `send_window_update` permits more data of a stream.

The gRPC gateway uses the whole package. The gRPC client in protocols/grpc.py uses its frames and
header blocks.
"""
