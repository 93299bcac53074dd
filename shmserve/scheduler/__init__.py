"""One process a model version: owns each request from arrival to answer, decides what runs when.

main.py, loop.py     the process; wait, receive, plan, send
core.py              what each message changes, and what runs next
  requests.py        a request, and the states of its life
  queue.py         admission, order, deadlines, cancellation
  dynamic.py         (now, queue) -> a batch, or until when to wait
  pool.py            instances: who is free, what each one runs
  executions.py      batches at workers: start, return, loss, overrun
  answers.py         one answer each
local clients.py            requests of programs outside the server, checked
pace.py, statistics.py, settings.py      how long executions take; counts; what was configured
"""
