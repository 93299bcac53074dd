"""Code that several packages share.

auth_tokens.py        authorisation: tokens with scopes, restricted APIs
duplicate_keys.py     rejection of JSON objects with duplicate keys
fd_limits.py          limits of file descriptors
host.py               memory, processors and accelerators of the host
model_metrics.py      metrics of models, over instances and reloads
model_names.py        validation of model names
peers.py              the user at the other end of a local connection; access to shared memory
tasks.py              background tasks of asyncio
tls.py                validation of TLS files
trace_settings.py     trace settings and sampling
"""
