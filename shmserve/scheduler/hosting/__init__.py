"""The process that hosts schedulers: the loop, the sockets and the clock.

Fronts and cores have none of these. (The sockets of an ensemble to its steps are in
ensemble/runner.py, and response_cache.py reads the time to measure itself.)

host.py             the entry point; the loop: wait, receive, tick, send, for all schedulers; one
                    scheduler: its sockets, its front, its core; the table of kinds
event_loop.py       waiting for sockets and timers; calls between the schedulers of one process
local_clients.py    validation of requests of programs outside the server
"""
