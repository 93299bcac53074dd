"""Resources that the models of the server share.

cache_shares.py   the response cache's bytes, in equal parts
rate_limiter.py   who may execute, by the resources that each instance needs, and the tickets
workspaces.py     who has memory of the shared workspaces, and the process that holds a device's
"""
