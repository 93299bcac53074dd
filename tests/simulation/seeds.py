"""Seeds that have broken a rule once, each with what it was: they are run first, for ever."""

SEEDS: dict[int, str] = {
    1: "what was read of a step was not released where the step had moved to another process",
    318: "an instance that offered itself when it had just been taken back was counted for ever",
    329: "what was read was released at a successor before that had heard of its instances",
    1369: "a step was told by the scheduler that it had gone away from that nobody serves it",
    2266: "a client read what a worker had lent to an ensemble that had ended since",
}
