"""The differential test: the same scripted arrivals to shmserve and to a real Triton.

    script.py      what a script is: its models, and steps (an arrival, a release, a cancellation)
    recorder.py    the Python model of all scripts: it tells the gate what it was given, and waits
    player.py      plays a script against one server, and writes down batches, responses, statistics
    compare.py     what two of these records differ in, and which of it is known
    servers.py     both servers, one after the other, each with the models of a group of scripts
    scripts/       the scripts, by scheduler

It is not among the tests that always run: `make differential`, once bench/peer_setup.sh has put a
Triton beside it; without one it is skipped. A difference is either a defect of ours, or known: the
script names it and why, and shmserve/differences.md has it where users can see it.

Triton 2.51 cannot be asked about an ensemble's `max_inflight_requests`, which it does not know, and
its Python backend not about what `batch_input` makes, which it does not give to a model.
"""
