"""Learns a commit policy (TraceLock) from a model's own right answers, and decodes with it."""

import lightning as L
from torch.optim import AdamW

import lit_dlm
from lit_dlm import TraceLockModule, TraceModule
from lit_dlm.backbones import load_backbone
from lit_dlm.callbacks import DecodeWriter
from lit_dlm.datamodules import PromptDataModule, TrajectoryDataModule
from lit_dlm.decoding import Decoder, NoQuota, ThresholdPolicy
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.policy import TraceLockPolicy

RUN, TASK = "runs/tracelock_from_python", WordProblems("train", 200)
backbone = load_backbone("tiny")

# 1. Decode training problems; keep the graded records, with features of half of the steps.
tracer = TraceModule(
    backbone,
    tokenizer="tiny",
    decoders={"threshold": Decoder(policy=ThresholdPolicy(0.99), quota=NoQuota())},
    level="features",
    step_ratio=0.5,
    hidden_rank=48,
    delta_rank=16,
    projector_dir=f"{RUN}/projector",
)
writer = DecodeWriter(trajectories_dir=f"{RUN}/traces", grade=True)
prompts = PromptDataModule([TASK], response_length=32, batch_size=100)
trainer = L.Trainer(devices=1, default_root_dir=RUN, callbacks=[writer], logger=False)
trainer.predict(tracer, prompts, return_predictions=False)

# 2. Learn which proposals stand at the end.
policy = TraceLockModule(
    backbone,
    tokenizer="tiny",
    projector=f"{RUN}/projector",
    head=AcceptanceConfig(width=64, num_layers=1, num_heads=4, ffn_width=128),
    optimizer=lambda params: AdamW(params, lr=2e-3),
)
states = TrajectoryDataModule(f"{RUN}/traces", only_correct=True)
L.Trainer(max_steps=150, devices=1, default_root_dir=RUN).fit(policy, states)

# 3. Decode a fresh problem with it: fewer forwards than the 32 of one token per step.
decoder = Decoder(policy=TraceLockPolicy(f"{RUN}/policy"), quota=NoQuota())
question = "Tom has 34 pens, finds 7, loses 5. How many pens?"
done = lit_dlm.generate("tiny", [question], decode=decoder, response_length=32)
print(f"{done.texts[0]}\n{done.num_steps[0]} forwards")
