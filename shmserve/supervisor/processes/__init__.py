"""Processes: children and their zygotes, and the control socket.

children.py          the children, the client of the zygotes, restart backoff: start reading here
zygote.py            the process that forks children
control_socket.py    messages between the supervisor and its processes
"""
