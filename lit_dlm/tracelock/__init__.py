"""TraceLock: a learned commit policy, from traces or from outcomes of its own decodes."""
