"""Seeds that have broken a rule once, each with what it was: they are run first, for ever."""

SEEDS: dict[int, str] = {
    2266: "a client read what a worker had lent to an ensemble that had ended since",
}
