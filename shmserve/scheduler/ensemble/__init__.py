"""The scheduling of an ensemble: to its clients the scheduler of a model, to the schedulers of its
steps a client.

core.py            what each message changes (no clock, no socket)
live.py            the requests that are not done: their failures, deadlines, and what has changed
graph.py           steps and the tensors between them, from the configuration
flow.py            the data flow of one request: tensors in, steps to run and responses out
values.py          a tensor on its way, counted by who uses it
steps/             steps are run, and what comes of them
requests.py        a request of the ensemble, and those of its steps
responses.py       what clients are told, and are reading
memory.py          the ensemble's arena, and workers' arenas
device_blocks.py   its memory on CUDA devices
"""
