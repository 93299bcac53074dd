"""The links of a worker to other processes. Start with scheduler.py.

scheduler.py      the scheduler that sends batches to the instance
supervisor.py     the supervisor: control messages, requests of models, the wait of the loop
workspace.py      leases of device memory, requested from the supervisor
"""
