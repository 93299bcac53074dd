"""Inter-process communication: the messages, sockets and memory that processes share.

Its rooms:

    messages/           the vocabulary: typed records, by who speaks to whom
    transport/          sockets: ZMTP over unix sockets, dealers and routers
    tensors/            datatypes, descriptors, packed requests and responses, signatures
    memory/             arenas, mappings, POSIX shared memory, CUDA IPC
    model_spec.py       a model's configuration, typed
    inflight.py         the in-flight table: requests submitted and not settled (sans IO)
    link_table.py       whoever submits to several schedulers: a link to each
    capabilities.py     the MACs by which local clients prove who they are and what they own
    endpoints.py        where a server's sockets are
    processes.py        parents and children: names, death signals, orphans
"""
