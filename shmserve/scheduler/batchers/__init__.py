"""Batching: what runs next. Batchers decide and do nothing else (base.py, dynamic.py, adaptive.py:
the queue and the time in, a batch or a time to wait until out); dispatchers (dispatch.py,
sequence/) act on that, and recovery.py where a worker is lost."""
