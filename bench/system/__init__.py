"""What is measured, and where: the servers, their processes, the machine."""
