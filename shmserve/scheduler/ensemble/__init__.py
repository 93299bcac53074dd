"""The scheduling of an ensemble.

To its clients an ensemble is a model with a scheduler. To the schedulers of its steps it is one
more client.

core.py            the decisions on each message (no clock, no socket)
request.py         a request, its states, its end, and the messages to its client
flow.py            the graph of the steps, the schedulers that serve their models, and the data
                   flow of one request
memory.py          tensors between steps and their memory: arenas and CUDA devices
runner.py          the steps in flight, and the links to their schedulers
step_messages.py   a step -> its request; its response -> values in the data flow
"""
