"""Schedulers: each owns its model version's requests from arrival to their last response, and
decides what runs when. One model is one process; the steps of an ensemble are in that of it.

main.py                 the process
hosting/                host.py         its loop: wait, receive, tick, send, for all that it hosts
                        hosted.py       one scheduler: sockets, front, core; the kinds as a table
                        in_process.py   calls between the schedulers of one process
                        local_clients.py
                                        requests of programs outside the server, checked
                        waiting.py      waiting for sockets, or for a time in microseconds
front.py                clients, submit, cancel, credit, release, drain, reports: for every kind
batching.py             the core of a model that has instances (no clock, no socket)
outboxes.py             what a core posts messages to
settings.py             what was configured
requests/               request.py      the state machine of a request, as a table
                        client.py       who submits
                        queue.py        admission, order by priority, deadlines
                        timers.py       whose time is over, and when the next one's is
                        responses.py    what clients are told; ordering
batchers/               base.py, dynamic.py, adaptive.py
                                        (queue, time) -> a batch, or until when to wait
                        estimates.py    what the adaptive one learns
                        dispatch.py     from the queue to the instances
                        recovery.py     workers that died, overran or talked nonsense: retries
                        sequence/       the sequence batcher: slots, strategies, its dispatch.py
instances/              pool.py         slots: who is there, who is free, what each one runs
                        executions.py   batches and responses between here and workers, and the
                                        recent service time
response_cache.py       responses kept for requests that come again
statistics/             counters, histograms, quantiles, responses by index
generative/             text: engines instead of a batcher, blocks instead of slots
ensemble/               the core of an ensemble: its steps are other models
"""
