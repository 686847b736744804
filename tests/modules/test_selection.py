"""Replay decisions against the decode loop."""

import pytest
import torch

from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, SlidingWindow
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.modules.selection import (
    SelectionSettings,
    step_candidates,
    step_commits,
)
from lit_dlm.modules.state_batch import collate_states
from lit_dlm.modules.tracelock import TraceLockModule
from tests.traces import recorded, small_backbone, small_projector

HEAD = AcceptanceConfig(width=16, num_layers=1, num_heads=2, ffn_width=16, dropout=0.0)


def scorer(spread: float = 20.0) -> AcceptanceScorer:
    torch.manual_seed(0)
    built = AcceptanceScorer(small_projector(), head=HEAD).eval()
    with torch.no_grad():
        built.head.logit_head.weight *= spread
    return built


@pytest.mark.parametrize(
    "selection",
    [
        SelectionSettings(threshold=0.5, max_accept_per_step=None),
        SelectionSettings(threshold=0.5, max_accept_per_step=1),
        SelectionSettings(threshold=0.9999, max_accept_per_step=2),
        SelectionSettings(
            threshold=0.5,
            max_accept_per_step=2,
            window=SlidingWindow(3),
            settings=DecodeSettings(eos_gate=True),
        ),
    ],
    ids=["free", "cap 1", "mostly fallback", "window and gate"],
)
def test_replay_commits_what_the_decode_loop_commits(selection: SelectionSettings) -> None:
    """Along a decode of the policy itself, every replayed step equals the recorded one."""
    backbone, built = small_backbone(), scorer()
    module = TraceLockModule(backbone, tokenizer="unused", projector=small_projector(), head=HEAD)
    module.scorer = built
    with torch.no_grad():
        policy = TraceLockPolicy(
            scorer=built,
            threshold=selection.threshold,
            max_accept_per_step=selection.max_accept_per_step,
        )
        decoder = Decoder(
            policy=policy, window=selection.window, quota=NoQuota(), settings=selection.settings
        )
        for record in recorded(backbone, 4, decoder=decoder):
            for step in range(record.num_steps):
                batch = collate_states([record], [record.state_at(step)])
                seen = module.observe(batch)
                proposals = batch.ids.clone()
                proposals[:, batch.start :] = seen.proposals
                candidates, visible = step_candidates(batch, proposals, backbone, selection)
                output = built(seen.features, seen.state, visible[:, batch.start :])
                commit = step_commits(
                    output.decision_logits, candidates[:, batch.start :], selection
                )
                assert commit[0].nonzero()[:, 0].tolist() == record.committed_at(step).tolist()


@pytest.mark.parametrize(("option", "value"), [("threshold", 1.5)])
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"SelectionSettings.{option}"):
        SelectionSettings(**{option: value})
