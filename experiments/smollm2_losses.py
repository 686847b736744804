"""What the runs of ``exp/sft_smollm2`` learned: curves, and losses on held-out responses.

    python experiments/smollm2_losses.py --data runs/smollm2 --out runs/smollm2/losses \
        --runs full=runs/smollm2/full block=runs/smollm2/block random=runs/smollm2/random_run

Held-out responses are those of ``test.jsonl`` that are no longer than what the runs trained on. For
a masked model the loss of a text is only bounded: by the cross-entropy of hidden tokens, averaged
over how many are hidden (:mod:`lit_dlm.likelihood`). The report also has the autoregressive loss
that the model began with, on the same tokens. With full attention the loss is also drawn against
the share of hidden tokens: where it is small, the context to the right helps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from smollm2 import loss
from transformers import AutoTokenizer, LlamaForCausalLM

from lit_dlm.backbones import HFBackbone, load_backbone
from lit_dlm.backbones.base import Rows
from lit_dlm.likelihood import log_likelihood_bound, masked_draws
from lit_dlm.reports.plots import Theme, method_styles, read_curves, save_themes, tidy_axes
from lit_dlm.system.files import write_atomically

Row = tuple[list[int], list[int]]
"""Tokens of a prompt and of its response."""


def main() -> None:
    """Scores what is not in the report yet, then draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of experiments/smollm2.py")
    parser.add_argument("--runs", nargs="+", required=True, help="name=folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--draws", type=int, default=16, help="masked copies of each row")
    options = parser.parse_args()
    runs = {name: Path(folder) for name, _, folder in (run.partition("=") for run in options.runs)}
    for path in (options.data / "test.jsonl", *(folder / "model" for folder in runs.values())):
        if not path.exists():
            parser.error(f"there is no {path}")
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(options.data / "model")
    texts = [json.loads(line) for line in (options.data / "test.jsonl").open()]
    rows: list[Row] = []
    kept = []
    for text in texts:
        turns = [{"role": "user", "content": text["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        row = tokenizer([prompt, text["response"] + tokenizer.eos_token])["input_ids"]
        if len(row[0]) <= 128 and len(row[1]) <= 160:
            rows.append(tuple(row))
            kept.append(text)
    rows, kept = rows[: options.rows], kept[: options.rows]
    path = options.out / "losses.json"
    if path.exists():
        report = json.loads(path.read_text())
    else:
        before = LlamaForCausalLM.from_pretrained(options.data / "model")
        report = {
            "tokens": [len(response) for _, response in rows],
            "autoregressive": [round(loss(before, tokenizer, [text]), 5) for text in kept],
            "models": {},
        }
    for name in [name for name in runs if name not in report["models"]]:
        found = scores(load_backbone(runs[name] / "model"), rows, options.draws)
        curve = read_curves(runs[name])["val/loss"]
        found["updates"] = [step + 1 for step, _ in curve]  # the logger counts from 0
        found["hidden"] = [value for _, value in curve]
        report["models"][name] = {key: [round(value, 5) for value in found[key]] for key in found}
        write_atomically(path, json.dumps(report) + "\n")
        print(f"{name}: {mean(found['loss'], report['tokens'])} nats a token", flush=True)
    write_atomically(options.out / "losses.md", markdown(report))
    draw(report, options.out / "losses.png")


@torch.inference_mode()
def scores(backbone: HFBackbone, rows: Sequence[Row], draws: int) -> dict[str, list[float]]:
    """Returns the losses of a masked model, in nats per token.

    ``loss`` is the bound of each row; ``by_share`` the mean cross-entropy of the hidden tokens of
    each masked copy, ``shares`` the share that it hides; both are empty for a block model.
    """
    found: dict[str, list[float]] = {"loss": [], "shares": [], "by_share": []}
    for number, (prompt, response) in enumerate(rows):
        if backbone.spec.attention == "block":
            bound = log_likelihood_bound(
                backbone, prompt, response, num_draws=draws, seed=number, batch_size=8
            )
            found["loss"].append(-bound / len(response))
            continue
        hidden = masked_draws(len(response), num_draws=draws, antithetic=True, seed=number)
        clean = torch.tensor([prompt + response]).expand(draws, -1)
        cells = torch.nn.functional.pad(hidden, (len(prompt), 0))  # (draws, L)
        shown = clean.masked_fill(cells, backbone.spec.mask_id)
        scored = backbone.score_tokens(Rows(shown, clean, cells, response_start=len(prompt)))
        means = [float(part.mean()) for part in scored.ce.split(hidden.sum(1).tolist())]
        found["loss"].append(float(np.mean(means)))
        found["shares"] += hidden.float().mean(1).tolist()
        found["by_share"] += means
    return found


def mean(losses: Sequence[float], tokens: Sequence[int]) -> str:
    """Formats the mean over tokens of the losses of rows, with its standard error over rows."""
    lengths = np.array(tokens)
    value = np.average(losses, weights=lengths)
    spread = lengths * (np.array(losses) - value) / lengths.mean()
    return f"{value:.3f} ± {spread.std(ddof=1) / len(tokens) ** 0.5:.3f}"


def markdown(report: dict[str, Any]) -> str:
    """Returns the report as a table, in nats per token.

    It has ``tokens``, the lengths of the test responses; ``autoregressive``, their losses; and
    ``models``, by name what :func:`scores` found, with ``updates`` and the loss of ``hidden``
    tokens of held-out training rows after each.
    """
    updates = sorted({step for found in report["models"].values() for step in found["updates"]})
    lines = f"| | test responses | {' | '.join(map(str, updates))} |\n"
    lines += f"|---|{'---:|' * (1 + len(updates))}\n"
    first = mean(report["autoregressive"], report["tokens"])
    lines += f"| autoregressive, as it comes | {first} |{' |' * len(updates)}\n"
    for name, found in report["models"].items():
        hidden = dict(zip(found["updates"], found["hidden"], strict=True))
        cells = [f"{hidden[step]:.2f}" if step in hidden else "" for step in updates]
        lines += f"| {name} | {mean(found['loss'], report['tokens'])} | {' | '.join(cells)} |\n"
    return lines


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws validation loss over the updates, and test loss against the share that is hidden."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = drawn.subplots(1, 2)
        styles = method_styles(list(report["models"]), theme)
        for (name, found), style in zip(report["models"].items(), styles, strict=True):
            colour = style["color"]
            left.plot(found["updates"], found["hidden"], color=colour, label=name)
            if found["shares"]:
                bins = np.minimum(np.array(found["shares"]) * 8, 7).astype(int)
                losses = [np.array(found["by_share"])[bins == n].mean() for n in range(8)]
                right.plot((np.arange(8) + 0.5) / 8, losses, "o-", markersize=3, color=colour)
        value = mean(report["autoregressive"], report["tokens"]).partition(" ")[0]
        right.axhline(float(value), color=theme.muted, linestyle="--")
        right.annotate("autoregressive", (0.99, float(value)), ha="right", va="bottom")
        left.set(xlabel="updates", ylabel="loss of hidden tokens, nats")
        right.set(xlabel="share of the response that is hidden", xlim=(0, 1), ylim=(0, None))
        left.legend()
        tidy_axes(left, right)
        return drawn

    save_themes(path, figure)


if __name__ == "__main__":
    main()
