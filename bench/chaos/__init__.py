"""A chaos test of a real server (`python -m bench.chaos --help`).

The server is under random load at every transport while processes, models, clients and the host
fail. Each response is checked.

    __main__.py  the command, and the repository: a model of each kind of scheduler
    loads.py     a table of clients, which check the responses
    faults.py    a table of faults
    ledger.py    requests, faults, recovery times; the errors that each fault permits: a table
    state.py     resources that must not grow during the test, and readiness
"""
