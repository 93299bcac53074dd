"""The supervisor: the control plane's process. It owns the process tree, and restarts what dies.

Its rooms:

    main.py             `shmserve serve`: the parts of a server, wired
    supervisor.py       its life: start, serve, drain, stop
    context.py          what the rooms below share
    kept.py             processes that are always there: gateways, holders of workspaces on CUDA
                        devices
    control_api.py      requests of gateways and models: load, register, log settings
    reload.py           SIGHUP: the settings that may change, and the repositories, are read again
    handover.py         a server gives all it has to the next one, while both run
    health.py           liveness, readiness, and who is told of them; signs of life for the service
                        manager, while every process gives one
    processes/          the process table, zygotes that fork, the control socket, backoff
    models/             the lifecycle of models: orders, versions, publications, the repository
    regions/            the registry of shared memory, its quotas
    resources/          what models share: cache bytes, tickets of the rate limiter, workspaces
    local_clients/      programs on this host that use shmserve.client
    events/             the event stream: who subscribes, what is published
    host/               listeners, the run directory, the log file, the start-up report, the
                        service manager, the link to a server that takes over
"""
