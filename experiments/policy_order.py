"""What a policy trained on outcomes does differently: what it commits when, and what it delays.

Decodes word problems on whole responses with a confidence threshold and with the policies that
``experiments/policy_bench.py`` has trained on traces and on outcomes. Every proposal is counted by
what its cell holds in the end: a number of the problem, a sign, a result, the mark before the
answer, the answer or the end of the text.

    python experiments/policy_order.py --bench runs/policy_bench  # writes KEPT
    python experiments/policy_order.py  # prints the table of the kept file
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import table
from torch import Tensor

from lit_dlm.backbones import load_tokenizer
from lit_dlm.decoding import CommitPolicy, Decoder, NoQuota, Observer, ThresholdPolicy
from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord
from lit_dlm.generation import generate
from lit_dlm.system.files import write_atomically
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.policy import TraceLockPolicy

KEPT = Path("docs/results/outcome_policies/policy_order.json")
KINDS = ("number", "sign", "result", "mark", "answer", "end")
SURE = 0.95
"""Probability from which a proposal counts as sure; this threshold would commit it at once."""


@dataclass
class Watch:
    """Records every proposal of decodes: its cell, its probability, whether it was committed."""

    requires: frozenset[str] = frozenset({"raw_prob"})
    batches: list[tuple[list[StepRecord], DecodeResult]] = field(default_factory=list)

    def on_start(self, state: DecodeState) -> None:
        self._steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self._steps.append(deepcopy(record))  # the next step may overwrite it

    def on_end(self, result: DecodeResult) -> None:
        self.batches.append((self._steps, result))


def main() -> None:
    """Measures where runs of the bench are given, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", type=Path, help="folder of the bench's runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.bench is None and not KEPT.exists():
        parser.error(f"--bench: expected runs of the policy bench, since {KEPT} is not there")
    if options.bench:
        write_atomically(KEPT, json.dumps(measured(options.bench), indent=1) + "\n")
    print(markdown(json.loads(KEPT.read_text())))


def measured(bench: Path) -> dict[str, Any]:
    """Returns, by policy, the figures of each seed, see :func:`habits`."""
    seeds = sorted(bench.glob("words/seed-*"))
    found: dict[str, Any] = {"threshold": [decoded(ThresholdPolicy(0.9))]}
    for name, folder in (("traces", "policy"), ("outcomes", "whole/outcome/policy/best")):
        policies = [
            TraceLockPolicy(seed / folder, threshold=0.95, max_accept_per_step=None)
            for seed in seeds
        ]
        found[name] = [decoded(policy) for policy in policies]
    return found


def right_answers(decoder: Decoder, task: WordProblems, observer: Observer) -> list[bool]:
    """Decodes all problems with the embedded model; returns which it solves."""
    done = generate(
        "tiny",
        [example.text for example in task.examples()],
        decode=decoder,
        response_length=32,
        batch_size=100,
        observers=[observer],
    )
    return [
        task.grade(example, text).is_correct
        for example, text in zip(task.examples(), done.texts, strict=True)
    ]


def decoded(policy: CommitPolicy) -> dict[str, Any]:
    """Measures one policy on problems that no policy was trained, chosen or compared on."""
    watch = Watch()
    task = WordProblems("test", 1000, 29)
    right = right_answers(Decoder(policy=policy, quota=NoQuota()), task, watch)
    forwards = np.concatenate([result.num_steps.numpy() for _, result in watch.batches])
    return {
        "accuracy": float(np.mean(right)),
        "forwards": float(forwards.mean()),
        "kinds": habits(watch, load_tokenizer("tiny")),
    }


def habits(watch: Watch, tokenizer: Any) -> dict[str, dict[str, float]]:
    """Returns, by kind of cell, how many are committed when, and what becomes of sure proposals.

    ``cells`` is their number; ``place`` the mean share of a decode's steps after which they are
    committed; ``unsure`` the share committed below a probability of 0.9; ``sure`` proposals of
    :data:`SURE` or more, over all steps; ``waits`` the share of these not committed in that step;
    ``changes`` the share of the waiting ones whose cell ends with another token.
    """
    counts: dict[str, Any] = defaultdict(lambda: defaultdict(float))
    for steps, result in watch.batches:
        final = result.ids[:, result.start :]
        kinds = [kinds_of(row, tokenizer) for row in final]
        for number, record in enumerate(steps, start=1):
            start = record.state.start
            for row, slot in enumerate(record.state.rows):
                share = number / int(result.num_steps[slot])
                for cell in record.candidates[row, start:].nonzero()[:, 0].tolist():
                    count = counts[kinds[slot][cell]]
                    assert record.proposal.raw_prob is not None
                    probability = float(record.proposal.raw_prob[row, start + cell])
                    is_committed = bool(record.commit[row, start + cell])
                    if is_committed:
                        count["cells"] += 1
                        count["place"] += share
                        count["unsure"] += probability < 0.9
                    if probability >= SURE:
                        count["sure"] += 1
                        count["waits"] += not is_committed
                        proposed = int(record.proposal.ids[row, start + cell])
                        count["changes"] += proposed != int(final[slot, cell])
    for count in counts.values():
        count["changes"] /= max(count["waits"], 1)
        count["waits"] /= max(count["sure"], 1)
        count["place"] /= count["cells"]
        count["unsure"] /= count["cells"]
    return {kind: dict(counts[kind]) for kind in KINDS}


def kinds_of(ids: Tensor, tokenizer: Any) -> list[str]:
    """Returns the kind of each cell of a final response."""
    kinds, number = [], "number"
    for token in tokenizer.convert_ids_to_tokens(ids.tolist()):
        if token in (tokenizer.eos_token, tokenizer.pad_token):
            kinds.append("end")
        elif "#" in token:
            kinds.append("mark")
            number = "answer"
        elif token.isdigit():
            kinds.append(number)
        else:
            kinds.append("sign")
            if number != "answer":
                number = "result" if token == "=" else "number"
    return kinds


def markdown(found: dict[str, Any]) -> str:
    """Returns the kept file as tables of means over seeds."""

    def mean(policy: str, kind: str, name: str) -> float:
        return float(np.mean([seed["kinds"][kind][name] for seed in found[policy]]))

    points = [["policy", "seeds", "right", "forwards"]]
    for policy, seeds in found.items():
        right, forwards = (
            np.mean([seed[name] for seed in seeds]) for name in ("accuracy", "forwards")
        )
        points.append([policy, str(len(seeds)), f"{100 * right:.1f}", f"{forwards:.1f}"])
    lines = [["positions", *(f"{policy}, stands at" for policy in found)]]
    learnt = list(found)[1:]
    lines[0] += [f"{policy}, wait (change)" for policy in learnt]
    for kind in KINDS:
        cells = [f"{100 * mean(policy, kind, 'place'):.0f}" for policy in found]
        cells += [
            f"{100 * mean(policy, kind, 'waits'):.0f} ({100 * mean(policy, kind, 'changes'):.0f})"
            for policy in learnt
        ]
        lines.append([kind, *cells])
    return table(points) + "\n" + table(lines)


if __name__ == "__main__":
    main()
