"""The one error for everything that can be wrong with stored trajectories."""


class TrajectoryFormatError(ValueError):
    """Stored bytes are not a well-formed block, shard or side file; the message says which."""
