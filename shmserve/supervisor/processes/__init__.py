"""Processes: children and their zygotes, the control socket, and hosts of schedulers.

children.py          the children, the client of the zygotes, restart backoff: start reading here
zygote.py            the process that forks children
control_socket.py    messages between the supervisor and its processes
scheduler_hosts.py   the processes that host schedulers
"""
