"""Model management: from a folder of the repository to versions that serve, and back.

A load passes through these modules:

    manager.py             receives the request, and executes what the lifecycle decides
    lifecycle.py           the state machine that executes the orders of each model in turn
    orders.py              orders, the state of a model, and the steps of a load
    load_planner.py        reads folder and configuration, and completes the configuration
    repository.py          folders, versions and fingerprints on disk
    model_version.py       a version: a scheduler, and instances or an ensemble's steps
    scheduler_process.py   its scheduler, and the processes that host schedulers
    instances.py           its instances, each of which has a worker process
    instance.py            an instance: its states; changes of their number; loads that hang
    registry.py            the models by name, and their statuses

Orders also come from these modules:

    ../reload.py           loads and unloads models as the repositories change
    on_demand.py           loads models by their first request, and unloads them to free memory
    autoscaler.py          changes the number of instances with the load
"""
