"""Inter-process communication: the messages, sockets and memory that processes share.

messages/           typed messages, grouped by sender and receiver
transport/          sockets: ZMTP over unix sockets, dealers and routers
tensors/            datatypes, descriptors, schemas of requests and responses, signatures
memory/             arenas, mappings, POSIX shared memory, CUDA IPC
model_spec.py       a model's typed configuration, and its parameters
engine_settings.py  the settings of a generative model's engine
class_source.py     classes in the text of a model's file
scheduler_client.py submits requests, and tracks them until they are completed (sans IO)
timers.py           the deadlines of requests (sans IO)
credit.py           flow control of responses (sans IO)
trace.py            the spans of requests
endpoints.py        paths of a server's sockets, and the MACs that authenticate local clients
processes.py        process control by functions of Linux and glibc
"""
