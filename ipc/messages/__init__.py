"""The messages between processes, by the part of the server that they belong to.

Names of commands are imperative, names of reports are in the past tense. transport/frames.py
encodes the messages, and unions.py lists which process sends which message to which.
"""
