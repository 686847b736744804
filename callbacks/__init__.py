"""Lightning callbacks that write results and trajectories."""

from callbacks.progress import ProgressBar
from callbacks.result_writer import ResultWriter
from callbacks.shard_writer import ShardWriter

__all__ = ["ProgressBar", "ResultWriter", "ShardWriter"]
