"""Code that several rooms share.

auth_tokens.py        authorisation: tokens with scopes, restricted APIs
duplicate_keys.py     JSON objects in which a name stands twice, refused
fd_limits.py          file descriptors
host.py               memory, processors and accelerators of the host
model_metrics.py      metrics of models, over instances and reloads
model_names.py        which are valid
peers.py              the user at the other end of a local connection, and access to shared memory
tasks.py              background tasks of asyncio
tls.py                TLS files, checked
trace_settings.py     what is traced
"""
