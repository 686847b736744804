"""Lightning callbacks that write results and trajectories."""

from callbacks.adapter_checkpoint import AdapterCheckpoint
from callbacks.calibration_plot import CalibrationPlot
from callbacks.discrimination import DiscriminationScore
from callbacks.joint_early_stopping import JointEarlyStopping
from callbacks.judge import HttpJudge
from callbacks.progress import ProgressBar
from callbacks.result_writer import ResultWriter
from callbacks.shard_writer import ShardWriter

__all__ = [
    "AdapterCheckpoint",
    "CalibrationPlot",
    "DiscriminationScore",
    "HttpJudge",
    "JointEarlyStopping",
    "ProgressBar",
    "ResultWriter",
    "ShardWriter",
]
