"""Nemotron-Labs-Diffusion: Ministral 3 of transformers, under masks that loops make.

Whatever is compared is written here after the release: the attention of its training forward, and
the generation of its first and simplest kind (``generate_dllm(shift_logits=False)`` of
Megatron-Bridge): a causal prompt, blocks of masks that see themselves whole, and each block once
more, causally, when it is finished.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Ministral3Config, Ministral3ForCausalLM

import lit_dlm.decoding as d
from lit_dlm.backbones import HFBackbone, load_backbone, resolve
from lit_dlm.backbones.export import export_model
from lit_dlm.likelihood import log_likelihood_bound, masked_draws
from lit_dlm.training.layout import lay_out
from lit_dlm.training.masking import RandomMasking
from tests.backbones.folders import IDS, NEMOTRON, weights_of, write
from tests.backbones.slow_masks import slow
from tests.decoding.states import as_rows_alone, decoded
from tests.fakes import fake_spec
from tests.finetuning.runs import examples
from tests.training.supervised import batch_of

MASK, SIZE = NEMOTRON["mask_token_id"], NEMOTRON["block_size"]
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as released, and transformers' model with its weights."""
    tensors = weights_of(NEMOTRON)
    assert {key.partition(".")[0] for key in tensors} == {"encoder", "diffusion_head"}
    folder = write(tmp_path_factory.mktemp("nemotron"), NEMOTRON, tensors)
    config = {key: value for key, value in NEMOTRON.items() if key != "model_type"}
    theirs = Ministral3ForCausalLM(Ministral3Config(**config, attn_implementation="eager")).eval()
    names = {
        key.replace("encoder.", "model.").replace("diffusion_head", "lm_head"): value
        for key, value in tensors.items()
    }
    theirs.load_state_dict(names)
    return folder, theirs


def backbone_of(folder: Path, **overrides: Any) -> Any:
    return HFBackbone(str(folder), spec_overrides=overrides).eval()


def reference(model: Any, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
    """``(B, L, V)`` logits of row ``i`` for token ``i``."""
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return model(ids, attention_mask=added, position_ids=positions).logits


def test_names_facts_and_logits_are_those_of_the_release(models, tmp_path: Path) -> None:
    folder, theirs = models
    backbone = load_backbone(folder)
    spec = backbone.spec
    assert (spec.family, spec.mask_id, spec.eos_ids, spec.bos_id) == (
        "nemotron_labs_diffusion",
        3,
        (1,),
        2,
    )
    assert (spec.attention, spec.block_size, spec.block_origin) == ("block", 4, "response")
    assert spec.causal_context
    assert backbone.max_positions == 64  # from there on queries are scaled
    every = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    places = torch.arange(7).expand(2, -1)
    expected = reference(theirs, IDS, every, places)
    torch.testing.assert_close(backbone(IDS), expected, atol=1e-5, rtol=1e-5)

    export_model(backbone, tmp_path / "again", layout="original")
    written, stored = (load_file(at / "model.safetensors") for at in (tmp_path / "again", folder))
    assert written.keys() == stored.keys()
    assert all(written[key].equal(stored[key]) for key in stored)
    assert resolve(tmp_path / "again").architecture.digest() == backbone.architecture.digest()
    export_model(backbone, tmp_path / "hf")
    same = load_backbone(tmp_path / "hf")
    assert same.architecture.digest() == backbone.architecture.digest()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    torch.testing.assert_close(reference(plain, IDS, every, places), expected, atol=1e-5, rtol=0)


def test_the_context_is_causal_in_blocks_without_whole_prompts() -> None:
    blocks = {"attention": "block", "block_size": 2, "causal_context": True}
    assert fake_spec(**blocks).causal_context
    for changes in ({"attention": "full"}, {"block_origin": "response", "whole_prompt": True}):
        with pytest.raises(ValueError, match="causal_context: expected block attention without"):
            fake_spec(**{**blocks, **changes})


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_a_canvas_is_causal_up_to_its_first_block_with_a_mask(models, origin: str) -> None:
    """Row 0 has two columns of padding; its masks are in blocks of their own, with either origin.

    Row 2 is finished: it is causal as a whole.
    """
    folder, theirs = models
    length, start = 13, 5
    ids = torch.randint(4, 40, (3, length), generator=torch.Generator().manual_seed(0))
    ids[0, 11] = ids[1, 6:] = MASK
    firsts = [2, 0, 0]
    real = torch.arange(length) >= torch.tensor(firsts)[:, None]

    def block(row: int, column: int) -> int:
        return (column - (firsts[row] if origin == "sequence" else start)) // SIZE

    def rule(row: int, query: int, key: int) -> bool:
        masks = [block(row, c) for c in range(length) if ids[row, c] == MASK]
        is_open = bool(masks) and block(row, query) >= min(masks)
        seen = block(row, key) <= block(row, query) if is_open else key <= query
        return seen and bool(real[row, key])

    positions = (real.long().cumsum(1) - 1).clamp_min(0)
    expected = reference(theirs, ids, slow(rule, 3, length), positions)
    found = backbone_of(folder, block_origin=origin).denoise(
        ids, pad_mask=real, response_start=start
    )
    expected[..., MASK] = -torch.inf
    torch.testing.assert_close(found.logits[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_tiles", [False, True])
def test_training_rows_equal_the_training_forward(models, by_tiles: bool, monkeypatch) -> None:
    """``[noisy | clean]`` of whole sequences: prompts of 1 to 4 tokens, which are never masked.

    Blocks count from the sequence's start, as in training; by tiles, FlexAttention's mask is read.
    """
    folder, theirs = models
    backbone = backbone_of(folder, block_origin="sequence")
    batch = batch_of(backbone, examples(4), num_padding=None)
    states = RandomMasking(min_t=0.3).states(batch)
    if by_tiles:
        monkeypatch.setitem(lay_out.__globals__, "wants_block_mask", lambda *_: True)
    found = backbone.score_tokens(lay_out(batch, states, backbone.spec)).ce
    expected = []
    for row, hidden in enumerate(states.hidden):
        first = batch.start - int(batch.num_prompt[row])
        clean = batch.ids[row, first:]
        L = len(clean)
        noisy = clean.clone()
        noisy[-len(hidden) :][hidden] = MASK

        def rule(_: int, query: int, key: int, L: int = L) -> bool:
            own, other = query % L // SIZE, key % L // SIZE
            if query < L:
                return own == other if key < L else own > other
            return key >= L and query >= key

        both = torch.cat([noisy, clean])[None]
        positions = torch.arange(L).repeat(2)[None]
        logits = reference(theirs, both, slow(rule, 1, 2 * L), positions)[0]
        logits[:, MASK] = -torch.inf
        cells = L - len(hidden) + states.supervised[row].nonzero()[:, 0]
        expected.append(
            torch.nn.functional.cross_entropy(logits[cells], clean[cells], reduction="none")
        )
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def published(model: Any, prompt: list[int], response: int, threshold: float | None):
    """Tokens and steps of the published generation; one token a step without a threshold."""
    cache, ids = DynamicCache(config=model.config), torch.tensor(prompt)
    model(ids[None], past_key_values=cache, use_cache=True)
    num_steps = 0
    for _ in range(0, response, SIZE):
        block, seen = torch.full((SIZE,), MASK), cache.get_seq_length()
        positions = torch.arange(seen, seen + SIZE)[None]
        every = torch.zeros(1, 1, SIZE, seen + SIZE)
        while (block == MASK).any():
            out = model(
                block[None], attention_mask=every, position_ids=positions, past_key_values=cache
            )
            cache.crop(-SIZE)
            logits = out.logits[0].index_fill(-1, torch.tensor([MASK]), -torch.inf)
            prob, token = logits.softmax(-1).max(-1)
            prob = torch.where(block == MASK, prob, -1.0)
            commit = prob >= (2.0 if threshold is None else threshold)
            commit[prob.argmax()] = True
            block = torch.where(commit, token, block)
            num_steps += 1
        model(block[None], position_ids=positions, past_key_values=cache, use_cache=True)
        ids = torch.cat([ids, block])
    return ids[len(prompt) :].tolist(), num_steps


@pytest.mark.parametrize("threshold", [None, 0.12])
@pytest.mark.parametrize("cached", [False, True])
def test_blocks_are_decoded_as_published(models, cached: bool, threshold: float | None) -> None:
    """Prompts of 5, 1 and 7 tokens in one padded batch, 12 cells in blocks of 4."""
    folder, theirs = models
    rule = {"policy": d.ConfidencePolicy(), "quota": d.FixedQuota(1)}
    if threshold:
        rule = {"policy": d.ThresholdPolicy(threshold), "quota": d.NoQuota()}
    decoder = d.Decoder(
        window=d.BlockWindow(SIZE), cache=d.BlockCache() if cached else d.NoCache(), **rule
    )
    result = decoded(decoder, backbone_of(folder, eos_ids=[38]), PROMPTS, 12)
    for row, prompt in enumerate(PROMPTS):
        tokens, num_steps = published(theirs, prompt, 12, threshold)
        assert 38 not in tokens
        assert result.ids[row, -12:].tolist() == tokens
        assert result.num_steps[row] == num_steps
    assert threshold is None or len(set(result.num_steps.tolist())) > 1


def test_rows_of_a_queue_decode_as_they_do_alone(models) -> None:
    """Prompts of 1 to 7 tokens: rows are in different blocks, and others take their place."""
    folder, _ = models
    decoder = d.Decoder(
        policy=d.ThresholdPolicy(0.12),
        quota=d.NoQuota(),
        window=d.BlockWindow(SIZE),
        cache=d.BlockCache(),
    )
    prompts = [[5 + row + i for i in range(1 + row % 7)] for row in range(16)]
    as_rows_alone(decoder, backbone_of(folder), prompts, 12)


def test_a_likelihood_is_that_of_blocks_after_a_causal_context(models) -> None:
    """A prompt of 3 tokens and 6 of an answer: blocks ``[3, 7)`` and ``[7, 9)``."""
    folder, theirs = models
    ids = torch.tensor([5, 9, 7, 11, 30, 8, 4, 17, 25])
    expected = 0.0
    for begin, end in ((3, 7), (7, 9)):
        visible = torch.ones(end, end).tril().bool()
        visible[begin:] = True
        for hidden in masked_draws(end - begin, num_draws=4, antithetic=True, seed=0):
            shown = ids[:end].clone()
            shown[begin:][hidden] = MASK
            logits = reference(theirs, shown[None], visible[None, None], torch.arange(end)[None])
            logits[..., MASK] = -torch.inf
            log_probs = logits[0].log_softmax(-1)[torch.arange(end), ids[:end]]
            share = float(hidden.sum()) / (end - begin)
            expected += float(log_probs[begin:][hidden].sum().detach()) / share / 4
    found = log_likelihood_bound(
        backbone_of(folder), ids[:3].tolist(), ids[3:].tolist(), num_draws=4
    )
    assert found == pytest.approx(expected, rel=1e-5)
