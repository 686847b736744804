"""Lightning callbacks that write results and trajectories."""

from callbacks.adapter_checkpoint import AdapterCheckpoint
from callbacks.calibration_plot import CalibrationPlot
from callbacks.discrimination import DiscriminationScore
from callbacks.interruption import Interruption
from callbacks.joint_early_stopping import JointEarlyStopping
from callbacks.judge import HttpJudge
from callbacks.progress import ProgressBar
from callbacks.result_writer import ResultWriter
from callbacks.reward_curve import RewardCurve
from callbacks.rollout_writer import RolloutWriter
from callbacks.shard_writer import ShardWriter
from callbacks.trace_pictures import TracePictures

__all__ = [
    "AdapterCheckpoint",
    "CalibrationPlot",
    "DiscriminationScore",
    "HttpJudge",
    "Interruption",
    "JointEarlyStopping",
    "ProgressBar",
    "ResultWriter",
    "RewardCurve",
    "RolloutWriter",
    "ShardWriter",
    "TracePictures",
]
