"""Text generation: which sequences run in each step of a model's instances, and in which blocks.

dispatch     from the queue to the engines, and the messages of their workers
  engine     one instance: plans a step, takes its results
    steps      a planned step, a running step, and the learned duration of steps
    sequences  the state of each sequence; their order; beam search; the KV pool of their blocks:
               references, prefix cache, extents
"""
