"""Can commit policies tell which proposals stand, on states of another decoder?

In its own decodes a policy decides which proposals stand, which favours its score. Here left to
right, random order and a threshold decode word problems, while TraceLock, confidence, entropy and
margin score every proposal. A proposal stands if its cell holds it in the end; only decodes with a
right answer count. ``docs/results/outcome_policies`` has the result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import resamples, table
from numpy.typing import NDArray
from policy_order import right_answers
from torch import Tensor

from lit_dlm.decoding import Decoder, NoQuota, RandomPolicy, SequentialPolicy, ThresholdPolicy
from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord
from lit_dlm.system.files import write_atomically
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.toy import WordProblems
from lit_dlm.tracelock.policy import TraceLockPolicy

HEURISTICS = ("confidence", "entropy", "margin")


class Judges:
    """Collects every judge's scores of all proposals, whichever decoder runs, over batches."""

    def __init__(self, policies: Sequence[TraceLockPolicy]) -> None:
        scored = {"raw_prob", "raw_entropy", "raw_margin"}
        self.requires = frozenset(scored).union(*(policy.requires for policy in policies))
        self.hidden_layers = policies[0].hidden_layers
        self.policies = policies
        # Of each step: seeds (M,), whether proposals stood in the end (M,), scores (M, judges)
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_start(self, state: DecodeState) -> None:
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def on_step(self, record: StepRecord) -> None:
        state, proposal, looked = record.state, record.proposal, record.candidates
        assert proposal.raw_prob is not None
        assert proposal.raw_entropy is not None
        assert proposal.raw_margin is not None
        scores = [proposal.raw_prob, -proposal.raw_entropy, proposal.raw_margin]
        scores += [policy.decision_logits(state, looked, proposal) for policy in self.policies]
        kept = (state.rows.clone(), proposal.ids.clone(), looked.clone())
        self._steps.append((*kept, torch.stack(scores, -1)))

    def on_end(self, result: DecodeResult) -> None:
        for rows, ids, looked, scores in self._steps:
            stood = ids == result.ids[rows]
            seeds = result.seeds[rows][:, None].expand_as(stood)
            self.rows.append((seeds[looked], stood[looked], scores[looked]))


def weighted_auroc(
    scores: NDArray[np.float64], stood: NDArray[np.bool_], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the AUROC of ``(N,)`` proposals for each of ``(S, N)`` weights; ties count half."""
    values, place = np.unique(scores, return_inverse=True)
    found = []
    for weight in weights:
        right, wrong = (
            np.bincount(place, weight * kind, minlength=len(values)) for kind in (stood, ~stood)
        )
        below = wrong.cumsum() - wrong / 2
        found.append((right * below).sum() / (right.sum() * wrong.sum()))
    return np.array(found)


def judge(seeds: Tensor, stood: Tensor, scores: Tensor, samples: int = 200) -> dict[str, Any]:
    """Returns the AUROC of every judge, and TraceLock's lead over the others.

    Scores are ``(N, 3 + policies)``: heuristics, then policies; the rest is ``(N,)``. Errors of
    means are over problems (by bootstrap) and policies together.
    """
    uids, problem = np.unique(seeds.numpy(), return_inverse=True)
    draws = np.random.default_rng(0).multinomial(
        len(uids), np.full(len(uids), 1 / len(uids)), samples
    )
    weights = np.concatenate([np.ones((1, len(uids))), draws])[:, problem]
    areas = np.stack(
        [weighted_auroc(one, stood.numpy(), weights) for one in scores.double().numpy().T]
    )  # (judges, 1 + samples)
    heuristics, policies = areas[: len(HEURISTICS)], areas[len(HEURISTICS) :]

    of_policies = resamples(len(policies), 1, samples)[1:]

    def described(values: NDArray[np.float64]) -> dict[str, float]:
        resampled = (of_policies * values[:, 1:].T).sum(1)
        return {"mean": values[:, 0].mean(), "error": resampled.std(ddof=1)}

    return {
        "problems": len(uids),
        "proposals": len(stood),
        "stand": float(stood.float().mean()),
        "auroc": {
            **{
                name: {"mean": area[0], "error": area[1:].std(ddof=1)}
                for name, area in zip(HEURISTICS, heuristics, strict=True)
            },
            "tracelock": described(policies),
        },
        "difference": {
            name: described(policies - area)
            for name, area in zip(HEURISTICS, heuristics, strict=True)
        },
    }


def main() -> None:
    """Decodes, scores and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", type=Path, required=True, help="exported folders")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = WordProblems("test", 500, seed=23)
    policies = [
        TraceLockPolicy(path, threshold=0.9, max_accept_per_step=None) for path in options.policies
    ]
    decoders = {
        "left to right": Decoder(policy=SequentialPolicy()),
        "random order": Decoder(policy=RandomPolicy()),
        "threshold 0.9": Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota()),
        "TraceLock 0.9 (one of the five)": Decoder(policy=policies[0], quota=NoQuota()),
    }
    report = {}
    for name, decoder in decoders.items():
        judges = Judges(policies)
        right = [
            sample_seed(0, str(number))
            for number, is_right in enumerate(right_answers(decoder, task, judges))
            if is_right
        ]
        seeds, stood, scores = map(torch.cat, zip(*judges.rows, strict=True))
        kept = torch.isin(seeds, torch.tensor(right))
        report[name] = judge(seeds[kept], stood[kept], scores[kept])
        write_atomically(options.out, json.dumps(report, indent=1) + "\n")
    print(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """One row for each decoder."""

    def cell(found: dict[str, float], form: str) -> str:
        return f"{found['mean']:{form}} ± {found['error']:{form[-3:]}}"

    judges = [*HEURISTICS, "tracelock"]
    lines = [["states of", "problems", "proposals", "stand", *judges, "tracelock less confidence"]]
    for name, found in report.items():
        counts = [str(found["problems"]), f"{found['proposals']:,}", f"{found['stand']:.3f}"]
        areas = [cell(found["auroc"][judge], ".3f") for judge in judges]
        lines.append([name, *counts, *areas, cell(found["difference"]["confidence"], "+.4f")])
    return table(lines)


if __name__ == "__main__":
    main()
