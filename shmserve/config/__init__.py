"""The settings of a server, from the flags of `shmserve serve`.

flags.txt         the table of flags
options.py        a flag, and the reader of that table
flag_values.py    flag values with their own syntax
command_line.py   the parsers of the command line and of the configuration file
server.py         the settings, frozen and validated
grpc.py           the settings of the gRPC listener
"""
