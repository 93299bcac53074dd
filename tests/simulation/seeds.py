"""Seeds that have broken a rule once, each with what it was: they are run first, for ever."""

SEEDS: dict[int, str] = {
    1369: "a step was told by the scheduler that it had gone away from that nobody serves it",
    2266: "a client read what a worker had lent to an ensemble that had ended since",
}

# Seeds that break a rule still, each with what is to be mended.
OPEN: dict[int, str] = {
    1: "what an ensemble that drains has read of a step is not released where the step's scheduler "
    "has just left the ensemble's process: three blocks of two workers stay lent to that process",
    160: "a step is told by a scheduler that drains that the server stops, while another serves it",
}
