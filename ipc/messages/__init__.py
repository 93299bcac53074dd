"""The messages between processes. Start with unions.py, which lists the senders and receivers.

Names of commands are imperative, names of reports are in the past tense. transport/frames.py
encodes the messages.

inference.py            clients, schedulers and workers: requests and responses
generation.py           the scheduler of a generative model and its workers: steps
control_requests.py     requests to the supervisor, and its replies
publications.py         state that the supervisor publishes, and the event feed
supervision.py          control of processes by the supervisor, and their start records
unions.py               the messages that each process may send to each other process
"""
