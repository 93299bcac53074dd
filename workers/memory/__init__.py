"""The memory of a worker. Start with outputs.py.

outputs.py          blocks of the worker's arena for outputs, and parallel copies
device_memory.py    device memory of other processes, opened by CUDA IPC handles
workspace.py        leases from the workspace pool of the device, or of host memory
tensors.py          bytes as torch tensors, and tensors as bytes
static_plan.py      memory plans of models with fixed shapes, and CUDA graphs
"""
