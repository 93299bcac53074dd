"""Sockets for typed messages, with many messages per frame; they never block and trust no peer.

zmtp.py         ZeroMQ's wire protocol, its connections, and dealers, the connecting ends of links
router.py       the bound ends of links
frames.py       records and messages, to MessagePack and back, with types checked

A `Router` binds a unix socket to which many `Dealer`s connect. The wire protocol is ZeroMQ's
(zmtp.py), so that a DEALER of any ZeroMQ library may connect. `post` queues a message. `flush`
sends all messages queued for a peer as one frame and is called once per iteration of a loop. `fd`
is readable when `receive` has messages; `receive` reads a bounded amount, and `fd` stays readable
if more is left.

There are no high-water marks. Credits bound the work in flight, and a slow peer costs memory but
never blocks. A malformed frame is dropped and counted; a violation of ZMTP closes the connection.
"""
