"""Work that a zygote does before it forks workers, so that none of them pays for it."""
