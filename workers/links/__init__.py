"""A worker's two links: to the scheduler that feeds its instance, and to the supervisor."""
