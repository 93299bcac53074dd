"""Sequences in a worker: control inputs, implicit state, batches by slot.

inputs.py     control inputs (START, END, READY, CORRID), and state that returns as an input
execute.py    a batch of sequences: one row per slot, null rows, no execution is repeated
"""
