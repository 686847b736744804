"""Lightning callbacks that write results and trajectories."""

from lit_dlm.callbacks.adapter_checkpoint import AdapterCheckpoint as AdapterCheckpoint
from lit_dlm.callbacks.attention_annealing import AttentionAnnealing as AttentionAnnealing
from lit_dlm.callbacks.decode_writer import DecodeWriter as DecodeWriter
from lit_dlm.callbacks.discrimination import DiscriminationScore as DiscriminationScore
from lit_dlm.callbacks.interruption import Interruption as Interruption
from lit_dlm.callbacks.joint_early_stopping import JointEarlyStopping as JointEarlyStopping
from lit_dlm.callbacks.judge import HttpJudge as HttpJudge
from lit_dlm.callbacks.progress import ProgressBar as ProgressBar, TrainingLog as TrainingLog
from lit_dlm.callbacks.record_shards import RolloutWriter as RolloutWriter
from lit_dlm.callbacks.reward_curve import (
    CalibrationPlot as CalibrationPlot,
    RewardCurve as RewardCurve,
)
from lit_dlm.callbacks.trace_pictures import TracePictures as TracePictures
