"""Calls: their interface for handlers, and their form on the wire.

call.py              the base class of calls, unary calls, and the interface of connections
streaming_call.py    calls with any number of messages
headers.py           the head of a call (method, deadline, metadata, encodings), and its status
messages.py          messages: assembled and inflated; framed and deflated
"""
