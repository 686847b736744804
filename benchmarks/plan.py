"""Peak memory of training steps and decodes on this machine, relative to their plans.

    python benchmarks/plan.py [--json] [--width 512] [--layers 8] [--rows 8] [--length 256]

Every case is a process of its own that builds a random model and takes two steps of AdamW, or two
of a decode. It measures the rise of its peak resident set (``VmHWM``) over what it had after steps
of a small model, which load all libraries. The allocator is set to return freed memory. A ratio
above 1 means that the plan was too low.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import measurement
import torch

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.base import Rows
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.commands.memory import GIB, plan_of
from lit_dlm.decoding import (
    BlockWindow,
    Decoder,
    DecodeSettings,
    DualCache,
    EntropyPolicy,
    FullWindow,
    NoCache,
    decode,
    prompt_canvas,
)

CASES: dict[str, dict[str, Any]] = {
    "all weights": {"trainable": True},
    "all weights, every layer recomputed": {"trainable": True, "gradient_checkpointing": True},
    "all weights, selective": {"trainable": True, "gradient_checkpointing": "selective"},
    "adapter": {"lora": {"rank": 16, "targets": "all"}},
    "decode": {},
    "decode, dual cache": {},
}
WIDTH = 32
"""Cells of the window where a decode has a cache."""


def architecture(arguments: argparse.Namespace) -> dict[str, Any]:
    """A decoder with full attention."""
    return {
        "vocab_size": arguments.vocab, "hidden_size": arguments.width,
        "intermediate_size": 4 * arguments.width, "num_layers": arguments.layers,
        "num_heads": 8, "num_kv_heads": 4, "mask_id": 3, "pad_id": 0, "eos_ids": [1],
    }  # fmt: skip


def planned(arguments: argparse.Namespace, name: str) -> int:
    """Returns the bytes of the plan; a third of each row is prompt."""
    prompt, options = arguments.length // 3, CASES[name]
    decoder = {"window": {"block_length": WIDTH}, "cache": "DualCache"} if "cache" in name else {}
    data = {
        "class_path": "SupervisedDataModule" if options else "PromptDataModule",
        "init_args": {
            "batch_size": arguments.rows,
            "max_prompt_length": prompt,
            "response_length": arguments.length - prompt,
        },
    }
    backbone = {"dtype": "float32", "architecture": architecture(arguments), **options}
    model = {
        "class_path": "SFTModule",
        "init_args": {
            "backbone": {"class_path": "HFBackbone", "init_args": backbone},
            "optimizer": {"class_path": "torch.optim.AdamW"},
            "decoders": {"one": decoder},
        },
    }
    plan = plan_of({"model": model, "data": data, "trainer": {"accelerator": "cpu", "devices": 1}})
    assert plan is not None
    return plan.most()


def measured(arguments: argparse.Namespace, name: str) -> int:
    """Returns the bytes that this process needs beyond its libraries."""
    options = CASES[name]
    given = {**options, "lora": LoRASettings(**options["lora"])} if "lora" in options else options

    def run(arguments: argparse.Namespace) -> int:
        before = measurement.reset_peak()
        backbone = HFBackbone(architecture=Architecture(**architecture(arguments)), **given)
        ids = torch.randint(4, arguments.vocab, (arguments.rows, arguments.length))
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1:, :5] = False
        prompt = arguments.length // 3
        if not options:
            is_cached = "cache" in name
            decoder = Decoder(
                policy=EntropyPolicy(),
                window=BlockWindow(WIDTH) if is_cached else FullWindow(),
                cache=DualCache() if is_cached else NoCache(),
                settings=DecodeSettings(max_steps=2),
            )
            canvas = prompt_canvas(
                [row[:prompt][seen[:prompt]] for row, seen in zip(ids, real, strict=True)],
                response_length=arguments.length - prompt,
                spec=backbone.spec,
                seeds=range(arguments.rows),
                device=backbone.device,
            )
            decode(backbone, decoder, canvas)
            return measurement.peak() - before
        scored = (torch.arange(arguments.length) >= prompt).expand_as(ids)
        trained = [weight for weight in backbone.train().parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for _ in range(2):
            backbone.score_tokens(Rows(ids, ids, scored, mask=real)).ce.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return measurement.peak() - before

    run(argparse.Namespace(width=16, layers=1, vocab=64, rows=2, length=32))
    return run(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases, or one in this process."""
    options = measurement.options(
        __doc__,
        arguments,
        width=(512, "width of the residual stream"),
        layers=(8, "decoder layers"),
        vocab=(32000, "ids of the vocabulary"),
        rows=(8, "rows of a batch"),
        length=(256, "tokens of a row"),
        case=("", "the only one"),
    )
    if options.case:
        print(measured(options, options.case))
        return
    figures: dict[str, float] = {}
    for name in CASES:
        child = subprocess.run(
            [sys.executable, *sys.argv, "--case", name],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        figures[f"{name}: GiB"] = int(child.stdout) / GIB
        figures[f"{name}: over its plan"] = int(child.stdout) / planned(options, name)
    measurement.tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
