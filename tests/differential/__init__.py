"""The differential test: the same scripted arrivals to shmserve and to a real Triton.

    script.py      a script: its models, and its steps (an arrival, a release, a cancellation)
    recorder.py    the Python model of all scripts: it reports its requests to the gate, and waits
    player.py      plays a script against one server, and writes down batches, responses, statistics
    compare.py     the differences of two records, and which of them are known
    servers.py     both servers, one after the other, each with the models of a group of scripts
    scripts/       the scripts, by scheduler

The test runs with `make differential` alone, after bench/peer_setup.sh has installed a Triton; it
is skipped without a Triton. A difference is either a defect of shmserve or known. The script lists
a known difference and its reason, and shmserve/differences.md describes it for users.

Two features cannot be compared: Triton 2.51 has no `max_inflight_requests` of an ensemble, and its
Python backend does not pass the tensors of `batch_input` to a model.
"""
