"""One process an ensemble: to its clients the scheduler of a model, to the schedulers of its steps
a client.

main.py, loop.py   the process; the event loop: wait, receive, plan, send
core.py            what each message changes, and which steps run next (no clock, no socket)
graph.py           steps and the tensors between them, from the configuration
flow.py            the data flow of one request: tensors in, steps to run and responses out
values.py          a tensor on its way, counted by who uses it
steps.py           steps are run, and what comes of them
requests.py        a request of the ensemble, and those of its steps
submission.py      a step that is to run -> the message to its model's scheduler
responses.py       what clients are told, and are reading
targets.py         who serves the steps' models
memory.py          the ensemble's arena, and workers' arenas
"""
