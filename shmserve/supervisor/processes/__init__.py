"""The child processes of the supervisor.

zygote.py           starts the processes: the supervisor's client of a zygote, and the zygote
children.py         detects the exits of the processes; the pauses before restarts
preloads.py         the modules that the zygote of workers imports
control_socket.py   the messages between the supervisor and all processes
"""
