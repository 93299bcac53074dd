"""The links of a worker to other processes. Start with processes.py.

processes.py      the supervisor: control messages, requests of models, the wait of the loop; and
                  the scheduler that sends batches to the instance
workspace.py      leases of device memory, requested from the supervisor
"""
