"""Pre-training batches: layout, hidden cells, drills, and determinism by step."""

from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lit_dlm
from lit_dlm.backbones import load_tokenizer
from lit_dlm.datamodules.pretraining import POOL_STEPS, PretrainDataModule
from lit_dlm.finetuning.pretrain import PretrainBatch
from lit_dlm.toy.sudoku import Sudoku
from lit_dlm.toy.word_problems import WordProblems

TINY = str(Path(lit_dlm.__file__).parent / "assets" / "tiny")


def stream(**options: object) -> PretrainDataModule:
    problems = WordProblems("train")
    settings = {"sources": [problems], "tokenizer": TINY, "batch_size": 8, "drills": problems}
    return PretrainDataModule(**settings | options)  # type: ignore[arg-type]


def equal(first: PretrainBatch, second: PretrainBatch) -> bool:
    names = ("ids", "hidden", "pad_mask")
    same = all(getattr(first, name).equal(getattr(second, name)) for name in names)
    if first.drill is None or second.drill is None:
        return same and first.drill is second.drill
    return same and first.drill.hidden.equal(second.drill.hidden)


def test_rows_are_padding_prompt_response_and_end_of_text() -> None:
    tokenizer = load_tokenizer(TINY)
    batch = stream().batch(0)
    for ids, real in zip(batch.ids, batch.pad_mask, strict=True):
        first = int(real.long().argmax())
        assert ids[:first].eq(tokenizer.pad_token_id).all()
        assert not real[:first].any()
        assert real[first:].all()
        prompt = tokenizer.decode(ids[first : batch.start])
        assert prompt.startswith("<|user|>")
        assert prompt.endswith("?<|assistant|>")
        response = ids[batch.start :]
        assert len(response) == 32
        end = int((response == tokenizer.eos_token_id).long().argmax())
        assert "#### " in tokenizer.decode(response[:end])
        assert response[end:].eq(tokenizer.eos_token_id).all()
    # Hidden cells of eight rows lie in strata of four counts: 1..4, 5..8, ...
    counts = sorted(batch.hidden.sum(1).tolist())
    assert all(4 * n < count <= 4 * n + 4 for n, count in enumerate(counts))


def test_a_batch_is_a_function_of_its_number_and_the_seed() -> None:
    first = stream()
    in_order = [first.batch(step) for step in range(POOL_STEPS + 3)]
    assert equal(in_order[POOL_STEPS + 2], stream().batch(POOL_STEPS + 2))
    assert equal(in_order[3], stream().batch(3))
    assert not equal(in_order[3], stream(seed=1).batch(3))
    assert not torch.equal(in_order[0].hidden, in_order[1].hidden)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 6), (2, 3), (3, 2)])
def test_an_update_has_the_same_batches_for_any_number_of_processes(
    world_size: int, accumulate: int
) -> None:
    """From step 9 on; all batches of a step have drills, or none."""
    size = world_size * accumulate

    def ready(rank: int, world_size: int, accumulate: int) -> PretrainDataModule:
        data, where = stream(), {"global_step": 9, "global_rank": rank, "world_size": world_size}
        data.trainer = SimpleNamespace(accumulate_grad_batches=accumulate, **where)  # type: ignore[assignment]
        return data

    found = [
        islice(ready(rank, world_size, accumulate).train_dataloader(), 2 * accumulate)
        for rank in range(world_size)
    ]
    in_turn = list(chain.from_iterable(zip(*found, strict=True)))
    alone = ready(0, 1, size)
    assert len(in_turn) == 2 * size
    for number, batch in enumerate(in_turn, start=9 * size):
        assert equal(batch, alone.batch(number))
    assert [batch.drill is None for batch in in_turn] == [True] * size + [False] * size


def test_a_pool_shares_its_problems_and_sorts_them_by_prompt_length() -> None:
    source = stream()
    starts = [source.batch(step).start for step in range(POOL_STEPS)]
    assert max(starts) > min(starts)
    widths = [int(source.batch(step).pad_mask.logical_not().sum()) for step in range(POOL_STEPS)]
    assert sum(widths) / (8 * POOL_STEPS) < 1.5  # mean padding cells of a row


def test_drills_are_dense_at_first_and_hide_mostly_results() -> None:
    tokenizer = load_tokenizer(TINY)
    source = stream(dense_drill_steps=4, batch_size=64)
    has_drill = [source.batch(step).drill is not None for step in range(11)]
    assert has_drill == [s in (0, 2, 5, 10) for s in range(11)]
    drill = source.batch(0).drill
    assert drill is not None
    assert not (drill.hidden & ~drill.pad_mask).any()
    results, others = [], []
    for ids, hidden, real in zip(drill.ids, drill.hidden, drill.pad_mask, strict=True):
        behind_equals = False
        tokens = tokenizer.convert_ids_to_tokens(ids[real])
        for token, is_hidden in zip(tokens, hidden[real].tolist(), strict=True):
            behind_equals = token == "=" or (behind_equals and token.isdigit())
            (results if behind_equals and token != "=" else others).append(is_hidden)
    # About 500 result digits and 1,600 other tokens: standard deviations 0.018 and 0.008.
    assert abs(sum(results) / len(results) - 0.8) < 0.07
    assert abs(sum(others) / len(others) - 0.1) < 0.035


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sources": []}, "sources"),
        ({"shares": [1.0, 2.0]}, "shares"),
        # A completion does not fit.
        ({"sources": [Sudoku("train")], "response_length": 19}, "response_length"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        stream(**options).batch(0)
