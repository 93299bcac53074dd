"""Code that several rooms share.

access/               who is at the other end of a connection, and what it may do
accelerators.py       which there are, without a driver
counters.py           counters that survive a reload of their model
model_metrics.py      models' own metrics
model_names.py        which are valid
model_settings.py     parameters in a model's configuration
duplicate_keys.py     JSON objects in which a name stands twice, refused
fd_limits.py          file descriptors
tasks.py              background tasks of asyncio
tls.py                TLS files, checked
"""
