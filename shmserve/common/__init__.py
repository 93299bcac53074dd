"""Code that several packages share.

auth_tokens.py        authorisation: tokens with scopes, restricted APIs
fd_limits.py          limits of file descriptors
host.py               memory, processors and accelerators of the host
model_metrics.py      metrics of models, over instances and reloads
names.py              validation of model names; rejection of duplicate keys in JSON
peers.py              the user at the other end of a local connection; access to shared memory
tasks.py              background tasks of asyncio
trace_settings.py     trace settings and sampling
"""
