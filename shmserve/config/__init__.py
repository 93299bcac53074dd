"""The settings of a server, from the flags of `shmserve serve`.

flags.txt         the table of flags; ignored_flags.txt: tritonserver's flags without effect
flags.py          the reader of the tables, and parsers of values with their own syntax
command_line.py   the parsers of the command line and of the configuration file
server.py         the settings, frozen and validated: start reading here
"""
