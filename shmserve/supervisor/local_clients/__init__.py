"""Local clients: programs on this host that use shmserve.client, and the memory they share."""
