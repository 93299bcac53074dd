"""A chaos test of a real server (`python -m bench.chaos --help`).

The server is under random load at every transport while processes, models, clients and the host
fail. Each response is checked.

    __main__.py  the command, and the repository: a model of each scheduler
    loads.py     who asks: a table of clients that know the right answer
    faults.py    what goes wrong: a table
    ledger.py    requests, faults, recovery times; the errors that each fault permits: a table
    state.py     what must be flat from beginning to end, and readiness
"""
