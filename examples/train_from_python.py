"""Decodes, fine-tunes an adapter on a list of answers, loads it again and decodes with it."""

import lightning as L
from torch.optim import AdamW

import lit_dlm
from lit_dlm import SFTModule
from lit_dlm.backbones import LoRASettings, load_backbone
from lit_dlm.datamodules import ResponsesList, SupervisedDataModule

RUN, QUESTION = "runs/from_python", ["Tom has 34 pens, finds 7. How many pens?"]
rows = [  # the model adds from the left; these answers add from the right
    {"prompt": f"Tom has {a} pens, finds {b}. How many pens?", "answer": f"{b}+{a}={a + b}"}
    for a in range(10, 50)
    for b in range(2, 10)
]

L.seed_everything(0)
backbone = load_backbone("tiny", lora=LoRASettings(rank=8, targets="all"))
print(lit_dlm.generate(backbone, QUESTION, tokenizer="tiny", response_length=32).texts[0])
module = SFTModule(
    backbone, tokenizer="tiny", optimizer=lambda params: AdamW(params, lr=2e-3), warmup_steps=5
)
data = SupervisedDataModule([ResponsesList(rows)], response_length=32, batch_size=32)
L.Trainer(max_epochs=6, devices=1, default_root_dir=RUN).fit(module, data)

module.export(f"{RUN}/adapter")
again = load_backbone("tiny", adapter=f"{RUN}/adapter")
print(lit_dlm.generate(again, QUESTION, tokenizer="tiny", response_length=32).texts[0])
