"""Replay decisions against the decode loop, and the small true rollout."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, SlidingWindow
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.heads.acceptance import AcceptanceConfig
from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.modules.selection import (
    ReferencePrompts,
    SelectionSettings,
    roll_out,
    step_candidates,
    step_commits,
)
from lit_dlm.modules.state_batch import collate_states, trace_state
from lit_dlm.modules.tracelock import TraceLockModule
from tests.traces import EOS, recorded, small_backbone, small_projector

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
        for record in recorded(backbone, 4, decoder=selection.decoder(built)):
            for step in range(record.num_steps):
                batch = collate_states([trace_state(record, step)])
                seen = module.observe(batch)
                proposals = batch.ids.clone()
                proposals[:, batch.start :] = seen.proposals
                candidates, visible = step_candidates(batch, proposals, backbone, selection)
                output = built(seen.features, seen.state, visible[:, batch.start :])
                commit = step_commits(
                    output.decision_logits, candidates[:, batch.start :], selection
                )
                assert commit[0].nonzero()[:, 0].tolist() == record.committed_at(step).tolist()


def test_rollout_of_the_references_own_method_agrees_fully() -> None:
    """The reference traces are decodes of the same policy: agreement 1 and their own steps."""
    backbone = small_backbone()
    selection = SelectionSettings(threshold=0.5)
    decoder = selection.decoder(scorer())
    records = recorded(backbone, 6, decoder=decoder)
    prompts = ReferencePrompts(limit=10)
    prompts.add(collate_states([trace_state(record, 0) for record in records]))
    outcome = roll_out(prompts, backbone, decoder)
    distinct = {tuple(record.prompt_ids.tolist()): record for record in records}
    assert outcome.prompts == len(distinct)
    assert outcome.agreeing == pytest.approx(len(distinct))
    assert outcome.steps == sum(record.num_steps for record in distinct.values())
    assert outcome.cells == 8 * len(distinct)


def test_agreement_counts_the_answer_and_its_first_end_of_text() -> None:
    """Reference 7 8 EOS EOS against a decode of 7 5 EOS 9: two of three."""
    backbone = small_backbone()
    prompts = ReferencePrompts(limit=1, found={((5,), ()): (7, 8, EOS, EOS)})

    class Fixed(Decoder):
        def __call__(self, *arguments: Any) -> Any:
            result = super().__call__(*arguments)
            ids = result.ids.clone()
            ids[:, result.start :] = torch.tensor([7, 5, EOS, 9])
            return replace(result, ids=ids)

    policy = TraceLockPolicy(scorer=scorer())
    outcome = roll_out(prompts, backbone, Fixed(policy=policy, quota=NoQuota()))
    assert outcome.agreeing == pytest.approx(2 / 3)


def test_prompts_are_distinct_real_and_limited() -> None:
    records = recorded(small_backbone(), 8)
    batch = collate_states([trace_state(record, 0) for record in [*records, *records]])
    prompts = ReferencePrompts(limit=3)
    prompts.add(batch)
    prompts.add(batch)
    assert len(prompts.found) == 3
    copies = ReferencePrompts(limit=3)
    copies.add(replace(batch, is_real=torch.zeros_like(batch.is_real)))
    assert not copies.found


@pytest.mark.parametrize(("option", "value"), [("threshold", 1.5), ("rollout_prompts", -1)])
def test_bad_options_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"SelectionSettings.{option}"):
        SelectionSettings(**{option: value})
