"""The supervisor, the process of the control plane, which owns all other processes.

Start reading at `main.py:serve`; `models/` has the path of a model load:

    main.py             `shmserve serve`: composition of a server
    supervisor.py       the life cycle of a server: start, serve, drain, stop
    context.py          the objects that all parts share, such as the control socket
    kept.py             permanent processes: gateways, and workspace holders of CUDA devices
    control_api.py      requests about regions, readiness and log settings (models/manager.py
                        handles the other requests about models)
    reload.py           changes on disk: SIGHUP for settings, the poller for repositories
    handover.py         the handover to a successor while both servers run
    health.py           liveness, readiness, and the service manager's watchdog
    processes/          zygote.py: the start of processes; children.py: their exits, restart
                        backoff; control_socket.py: the messages between the supervisor and them
    models/             loading, versions, publications, the repository index
    regions/            the registry of shared memory regions, and its quotas
    resources/          shared resources: the rate limiter, cache bytes, workspaces
    local_clients/      programs on this host that use shmserve.client
    events/             the event stream
    checks/             the checks of the host
    host/               listeners, run directory, log file, start-up report, service manager, and
                        link between two servers of a handover
"""
