"""The process that hosts schedulers: the loop, the sockets and the clock, which fronts and cores
have not. (The sockets of an ensemble to its steps are in ensemble/steps/links.py, and
response_cache.py reads the time to say how long it took.)

host.py             the loop: wait, receive, tick, send, for all that the process hosts
hosted.py           one scheduler of it: its sockets, its front, its core; the kinds as a table
in_process.py       calls between the schedulers of one process
local_clients.py    requests of programs outside the server, checked
waiting.py          waiting for sockets, or for a time in microseconds
"""
