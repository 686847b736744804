"""Lightning callbacks that write results and trajectories."""

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint
from lit_dlm.callbacks.attention_annealing import AttentionAnnealing
from lit_dlm.callbacks.decode_writer import DecodeWriter
from lit_dlm.callbacks.discrimination import DiscriminationScore
from lit_dlm.callbacks.interruption import Interruption
from lit_dlm.callbacks.joint_early_stopping import JointEarlyStopping
from lit_dlm.callbacks.judge import HttpJudge
from lit_dlm.callbacks.progress import ProgressBar, TrainingLog
from lit_dlm.callbacks.record_shards import RolloutWriter
from lit_dlm.callbacks.reward_curve import CalibrationPlot, RewardCurve
from lit_dlm.callbacks.trace_pictures import TracePictures

__all__ = [
    "AdapterCheckpoint",
    "AttentionAnnealing",
    "CalibrationPlot",
    "DecodeWriter",
    "DiscriminationScore",
    "HttpJudge",
    "Interruption",
    "JointEarlyStopping",
    "ProgressBar",
    "RewardCurve",
    "RolloutWriter",
    "TracePictures",
    "TrainingLog",
]
