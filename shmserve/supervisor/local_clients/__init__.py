"""Programs on this host that use shmserve.client: their connection, and the memory they share."""
