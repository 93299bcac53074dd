"""The load generator of `shmserve perf`, for any server of the v2 protocol.

data.py        what is sent: inputs made by shape, or from values, a file or a program
regions.py     memory that is registered with the server, for inputs and outputs
targets.py     what a command line asks: a door, and the requests for it
load.py        a load: when requests are sent, slots, each with a lane, and what became of them
measure.py     one point of a sweep: windows, when they agree, percentiles
report.py      the table, JSON, CSV, a picture, and a comparison with an older report
search.py      which configuration answers most within a latency target
"""
