"""Text generation: which sequences run in each step of a model's instances, and in which blocks.

dispatch    from the queue to the engines, and what their workers say
  engine    one instance: plans a step, takes its results
    step_plan    a step that is planned, and one that runs
    sequences    what is computed of each, and what is to come
    blocks       the KV pool: references, prefix cache, extents
    policies     who goes first, and who makes room
    pace         what a step costs, and what follows
    beams        beam search
"""
