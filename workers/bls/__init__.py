"""Business logic scripting: a model that calls other models is a client of their schedulers.

request.py    the data of a request and of a response, and the memory of inputs
calls.py      calls in flight: with one response, or with a stream of responses
router.py     submission of calls to schedulers, the wait for responses, and failover
"""
