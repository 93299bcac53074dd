"""What several rooms of the server share: names, counters, access, credentials."""
