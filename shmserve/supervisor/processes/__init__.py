"""The child processes of the supervisor.

children.py         starts and ends the processes, and detects their exits
zygote.py           the process that forks them, and the protocol of its requests
control_socket.py   the messages between the supervisor and all processes
"""
