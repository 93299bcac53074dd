"""Batching: batchers decide what runs next (dynamic.py, adaptive.py: from the queue and the time to
a batch or a time to wait until); dispatchers (dispatch.py, sequence/) start what they decide."""
