"""The settings of a server, made of the flags of `shmserve serve`.

flags.txt         the table of flags
options.py        a flag, and that table read
flag_values.py    values with a syntax of their own
command_line.py   the parsers of the command line and of its file, by that table
server.py         the settings: frozen, checked
grpc.py           those of the gRPC listener
"""
