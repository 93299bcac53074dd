"""The load generator of `shmserve perf`, for any server of the v2 protocol.

data.py        request data: generated, or from values, a file or a program
targets.py     the server, the protocol and the requests that a command line selects; regions
load.py        a load: the schedule, slots (lanes with one request each), records of requests
measure.py     one point of a sweep: windows, their agreement, percentiles
report.py      the table, JSON, CSV, a chart, and a comparison with an older report
search.py      the search for the highest throughput within a latency target
"""
