"""Sequences in a worker: control inputs, implicit state, batches by slot.

controls.py   control inputs: START, END, READY, CORRID
state.py      implicit state: outputs that come back as inputs of the sequence's next request
execute.py    a batch of sequences: a row a slot, null rows, nothing that runs twice
"""
