"""Batching: batchers decide what runs next, and dispatchers execute these decisions.

A batcher (dynamic.py, adaptive.py) decides from the queue and the time: it returns a batch, or the
time at which its wait ends. The dispatchers are in dispatch.py and sequence_dispatch.py.

The sequence batcher (sequences.py, sequence_dispatch.py) sends the requests of one sequence to one
instance, in order, because the sequence's state is there.
"""
