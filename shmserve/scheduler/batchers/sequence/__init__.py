"""The sequence batcher: requests of one sequence go to one instance, in order, where its state is.

sequences.py    the table of all sequences: ids, slots, idle ones (pure)
backlog.py      those that wait for a slot
slots.py        a sequence; the slots of one instance, and the strategies: which make a batch
dispatch.py     from the queue to the instances
"""
