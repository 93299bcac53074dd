"""Chaos: a real server under random load at every door, while its processes, its models, its
clients and its host misbehave; each answer is checked (`python -m bench.chaos --help`).

    models.py    the repository: a model of each scheduler
    loads.py     who asks: a table of clients that know the right answer
    faults.py    what goes wrong: a table
    allowed.py   which error may come under which fault: a table
    ledger.py    what was asked, answered and refused; recovery
    state.py     what must be flat from beginning to end, and readiness
"""
