"""Sockets that speak typed messages: many a frame, never blocking, never trusting.

A `Router` binds a unix socket, many `Dealer`s connect to it; on the wire they are ZeroMQ's (see
zmtp.py), so that a DEALER of any ZeroMQ library may connect. `post` queues; `flush` sends
everything queued for a peer as one frame: call it once a loop turn. `fd` is readable when `receive`
has something to do; it takes a bounded amount, and what is left is announced again. There are no
high-water marks: work in flight is bounded by credits, and a peer that does not read costs memory,
never a wait. A frame that is not ours is dropped and counted; what is not ZMTP ends its connection.
"""
