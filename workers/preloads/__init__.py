"""Preloads: imports and warm-up that a zygote does before it forks workers, so that none pays."""
