"""Seeds that have broken a rule once, each with what it was: they are run first, for ever."""

SEEDS: dict[int, str] = {}
