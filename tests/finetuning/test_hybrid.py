"""Masked and next tokens in one row: loss and gradients of slow loops on whole logits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.finetuning.hybrid import HybridModule
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.masking import CoupledMasking, RandomMasking
from tests.finetuning.runs import examples, small
from tests.training.supervised import LEARNING, assert_same_loss, batch_of

MODEL: dict[str, Any] = {
    "decoder": "llama", "attention": "block", "block_size": 3, "causal_context": True
}  # fmt: skip
MASKING = RandomMasking(min_t=0.001, weight="none/t")


def hybrid(masking: Any = MASKING, alpha: float = 0.3, **changes: Any) -> HybridModule:
    model = small(**{**MODEL, **changes})
    return HybridModule(model, masking=masking, alpha=alpha, num_padding=None, **LEARNING)


def slow_parts(model: HybridModule, batch: SupervisedBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of masked tokens over their noise levels, and of next tokens, one by one.

    A sample at a time, without padding; a noisy block at a time, behind its clean context.
    """
    backbone, states = model.backbone, model.states(batch)
    spec, masked, next_tokens = backbone.spec, [], []

    def log_prob(ids: Tensor, visible: Tensor, place: int, token: Tensor) -> Tensor:
        logits = backbone(ids[None], visible[None, None])[0, place].double()
        logits = logits.index_fill(0, torch.tensor(spec.forbidden_ids), -torch.inf)
        return logits.log_softmax(-1)[token]

    for row, hidden in enumerate(states.hidden):
        first = batch.start - int(batch.num_prompt[row])
        clean, start = batch.ids[row, first:], batch.start - first
        origin = start if spec.block_origin == "response" else 0
        for cell in range(len(hidden)):
            place = start + cell
            if states.supervised[row, cell]:
                begin = place - (place - origin) % spec.block_size
                ids = clean[: begin + spec.block_size].clone()
                for column in range(max(begin, start), len(ids)):
                    if hidden[column - start]:
                        ids[column] = spec.mask_id
                visible = torch.ones(len(ids), len(ids)).tril().bool()
                visible[begin:] = True
                ce = -log_prob(ids, visible, place, clean[place])
                masked.append(ce * states.weight[row, cell].double())
            if place > 0:
                causal = torch.ones(place, place).tril().bool()
                next_tokens.append(-log_prob(clean[:place], causal, place - 1, clean[place]))
    return masked, next_tokens


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_loss_and_gradients_equal_a_slow_loop(origin: str, alpha: float) -> None:
    """Prompts of none to four tokens; each part is a mean over its own tokens."""
    model = hybrid(block_origin=origin, alpha=alpha, lora=False)
    given = examples(5)
    given[0] = replace(given[0], prompt_ids=given[0].prompt_ids[:0])
    batch = batch_of(model, given)
    masked, next_tokens = slow_parts(model, batch)
    terms = model.terms(batch)
    slow = alpha * torch.stack(masked).mean() + torch.stack(next_tokens).mean()
    assert_same_loss(model, terms.total, slow)
    means = terms.means()
    assert means["num_supervised"] == len(masked)
    torch.testing.assert_close(model.combined(means), terms.total.detach())


def test_each_part_is_divided_by_its_own_tokens_of_all_processes() -> None:
    """Of two processes, with 100 tokens more in the other one."""
    model = hybrid()
    model.loss_norm = "global"
    strategy = SimpleNamespace(reduce=lambda count, reduce_op: count + 100)
    batch = batch_of(model, 3)
    masked, next_tokens = slow_parts(model, batch)
    model.trainer = SimpleNamespace(world_size=2, strategy=strategy)
    expected = sum(
        share * torch.stack(parts).sum() / ((len(parts) + 100) / 2)
        for share, parts in ((0.3, masked), (1.0, next_tokens))
    )
    torch.testing.assert_close(model.terms(batch).total.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_has_no_next_tokens_of_its_own_is_refused() -> None:
    for changes in ({"causal_context": False}, {"shift": 1}):
        with pytest.raises(ValueError, match="backbone: expected causal_context and shift 0"):
            hybrid(**changes)
    paired = hybrid(CoupledMasking())
    with pytest.raises(ValueError, match="masking: expected one state in a row"):
        paired.terms(batch_of(paired, 2))
