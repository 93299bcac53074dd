"""The steps of an ensemble's requests, at the schedulers of their models.

runner.py      steps are submitted, as many at a time as may run, and end
submission.py  a step that is to run -> the message to its model's scheduler
outputs.py     a step's response -> values in the flow of its request
targets.py     who serves the steps' models
links.py       the links to their schedulers
"""
