"""gRPC calls: their interface for handlers, and their encoding.

call.py        unary calls and streaming calls, and the interface of connections
headers.py     the head of a call (method, deadline, metadata, encodings), and its status
messages.py    messages: assembled and inflated; framed and deflated
"""
