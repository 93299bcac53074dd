"""Resources that the models of the server share.

call_waits.py     deadlocks among the calls of several requests (pure)
rate_limiter.py   tickets for executions, and the shares of the response cache
workspaces.py     the memory pools of devices, and the process that holds a CUDA device's
"""
