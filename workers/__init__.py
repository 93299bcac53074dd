"""The data plane: worker processes, which run models and alone map clients' regions.

Its rooms:

    main.py             the process: it loads one instance of one model, and serves it
    context.py          what an instance was started with, and the resources it has
    instance.py         its loop: wait, execute, report
    links/              to the scheduler that feeds it, and to the supervisor
    batch/              requests unpacked, inputs gathered, run, outputs scattered; those that an
                        instance runs before it is ready
    tensor_specs.py     inputs and outputs: described by a file, and as the model receives them
    sequences/          control inputs of sequences, batches of their slots
    backends/           the contract of a backend, and the five there are
    bls/                business logic scripting: a model's calls of other models
    memory/             outputs in the arena, device memory, copies
    device.py           where a model runs: the CPU, an accelerator
    user_code.py        models' own files, imported
    preloads.py         what a zygote imports and runs before it forks workers
    triton_python_backend_utils.py      Triton's API for Python models
"""
