"""The sequence batcher: requests of one sequence go to one instance, in order, where its state is.

sequences.py    the table of all sequences: ids, slots, those that wait for one, idle ones (pure)
slots.py        a sequence; the slots of one instance, and the strategies: which make a batch
dispatch.py     from the queue to the instances
"""
