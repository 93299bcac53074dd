"""Text generation: which sequences run in each step of a model's instances, and in which blocks.

generation_dispatch.py  from the queue to the engines, and the messages of their workers
engine.py               the engine of one instance: plans a step, handles its results
steps.py                a planned step, a running step, and the learned duration of steps
sequences.py            the state of each sequence; their order; beam search; the KV pool of their
                        blocks: references, prefix cache, extents
"""
