"""Lightning callbacks that write results and trajectories."""

from callbacks.result_writer import ResultWriter

__all__ = ["ResultWriter"]
