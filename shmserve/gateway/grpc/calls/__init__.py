"""Calls: what a handler sees of them, and what they are on the wire.

call.py              what all calls have, and unary ones; what connections are to them
streaming_call.py    those with any number of messages
headers.py           the head of a call (method, deadline, metadata, encodings), and its status
messages.py          messages out of pieces of data, inflated; framed and deflated
"""
