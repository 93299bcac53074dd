"""Schedulers: each owns its model version's requests from arrival to their last response.

A scheduler decides which requests run when. Each model has its own process, except that the steps
of an ensemble are scheduled in the ensemble's process.

hosting/                host.py         the process: its entry point and its loop; one scheduler:
                                        sockets, front, core; the table of kinds
                        local_clients.py
                                        validation of requests of programs outside the server
front.py                the messages of clients and of the supervisor, for every kind of scheduler
batching.py             the core of a model that has instances (no socket)
settings.py             the scheduling of a model version
requests/               scheduled.py    the state machine of a request, as a table; its client
                        queue.py        admission, order by priority, deadlines
                        responses.py    messages to clients; ordering
batchers/               __init__.py     the interface: (queue, time) -> a batch, or a wait; the
                                        dynamic batcher
                        adaptive.py     the batcher that meets a target of latency
                        estimates.py    the estimates of the adaptive batcher
                        sequences.py, sequence_dispatch.py
                                        the sequence batcher: slots, strategies, its dispatcher
instances/              pool.py         slots: which instances are ready, free, busy; tickets
                        dispatch.py     from the queue to the instances: dispatchers,
                                        and messages to workers; the recent service time
                        results.py      messages of workers; retries of requests of lost workers
response_cache.py       responses of earlier requests
statistics.py           the counters of a model version and their report
tables.py               tables of counters, histograms, quantiles
generative/             text: engines instead of a batcher, blocks instead of slots
ensemble/               the core of an ensemble: its steps are other models
"""
