"""The process that hosts schedulers, and all that has a socket or a clock.

host.py             the loop: wait, receive, tick, send, for all that the process hosts
hosted.py           one scheduler of it: its sockets, its front, its core; the kinds as a table
in_process.py       calls between the schedulers of one process
local_clients.py    requests of programs outside the server, checked
waiting.py          waiting for sockets, or for a time in microseconds
"""
