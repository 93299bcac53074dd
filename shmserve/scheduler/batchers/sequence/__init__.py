"""The sequence batcher: requests of one sequence go to one instance, in order, where its state is.

sequences.py    the table of all sequences: ids, slots, idle ones (pure)
backlog.py      those that wait for a slot
lane.py         a sequence; the slots of one instance
direct.py       Triton's direct strategy: a row of the batch for each slot
oldest.py       its oldest strategy: a dynamic batcher over the first request of each slot
dispatch.py     from the queue to the instances
"""
