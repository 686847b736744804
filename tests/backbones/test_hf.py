"""The forward of the Hugging Face backbone on tiny random models."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_dlm.backbones import FromAR, weights
from lit_dlm.backbones.export import export_model
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.tensors import graphs
from tests.backbones.conftest import tiny_architecture
from tests.graphs import emulated

Maker = Callable[..., HFBackbone]
IDS = torch.tensor([[5, 9, 3, 7, 3, 11], [4, 3, 8, 3, 6, 2]])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("positions", ["cumsum", "arange"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("decoder", ["qwen2", "llama", "qwen3"])
def test_a_padded_row_equals_the_row_alone(
    make_backbone: Maker, decoder: str, shift: int, positions: str, padding: str, trains: bool
):
    """Rotary positions act by their differences, so counting from a pad or a token is the same.

    Without gradients the heads that share keys go through another mask.
    """
    backbone = make_backbone(decoder=decoder, shift=shift, positions=positions, num_kv_heads=1)
    ids = torch.tensor([[5, 9, 3, 7, 3, 11], [8, 3, 6, 2, 0, 0]])
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    if padding == "left":
        ids[1], real[1] = ids[1].roll(2), real[1].roll(2)
    with torch.set_grad_enabled(trains):
        together = backbone.denoise(ids, pad_mask=real, hidden_layers=(0, 2, -1))
    rounding = {"rtol": 1e-5, "atol": 1e-5}  # some processors add a padded row in another order
    for row in (0, 1):
        alone = backbone.denoise(ids[row, real[row]][None], hidden_layers=(0, 2, -1))
        torch.testing.assert_close(together.logits[row][real[row]], alone.logits[0], **rounding)
        torch.testing.assert_close(together.hidden[row][real[row]], alone.hidden[0], **rounding)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("layers", [(), (2,), (-1,)])
def test_selected_columns_equal_the_full_rows_and_cost_no_more(
    make_backbone: Maker, layers: tuple[int, ...], shift: int
):
    """A snapshot of the last layer has all six columns, so its MLP runs there too."""
    backbone = make_backbone(shift=shift)
    columns = torch.tensor([[4, 0, 2], [1, 5, 5]])
    full = backbone.denoise(IDS)
    rows: dict[str, int] = {}
    parts = {"head": backbone.model.lm_head, "mlp": backbone.model.model.layers[-1].mlp}
    for name, part in parts.items():
        part.register_forward_pre_hook(
            lambda _, inputs, name=name: rows.update({name: inputs[0].shape[1]})
        )
    some = backbone.denoise(IDS, columns=columns, hidden_layers=layers)
    assert rows == {"head": 3, "mlp": 6 if layers == (-1,) else 3}
    assert torch.equal(full.columns, torch.arange(6).expand(2, -1))
    assert torch.equal(some.columns, columns)
    expected = torch.stack([full.logits[b, columns[b]] for b in range(2)])
    torch.testing.assert_close(some.logits, expected)


@pytest.mark.parametrize("shift", [0, 1])
def test_hidden_snapshots_equal_transformers_own(make_backbone: Maker, shift: int):
    """Tuple of 4 states for 3 layers: embedding, after layers 1 and 2, after the final norm."""
    backbone = make_backbone(shift=shift)
    states = backbone.model.model(input_ids=IDS, output_hidden_states=True).hidden_states
    assert len(states) == backbone.num_layers + 1
    hidden = backbone.denoise(IDS, hidden_layers=(-1, 0, 2, 1, -2)).hidden
    assert hidden.shape == (2, 6, 5, 16)
    for place, index in enumerate((3, 0, 2, 1, 2)):
        for column in range(6):
            raw = states[index][:, max(column - shift, 0)]
            torch.testing.assert_close(hidden[:, column, place], raw)


def test_the_last_snapshot_times_the_head_gives_the_logits(make_backbone: Maker):
    """Ties hidden alignment to logit alignment, with LLaDA's scaling and a forbidden pad."""
    backbone = make_backbone(shift=1, logit_scale=0.25, forbidden_ids=(0,))
    denoised = backbone.denoise(IDS, hidden_layers=(3,))
    expected = denoised.hidden[:, :, 0] @ backbone.model.lm_head.weight.T * 0.25
    expected[..., [0, 3]] = float("-inf")
    torch.testing.assert_close(denoised.logits, expected)


def test_absent_hidden_layers_and_masks_of_numbers_are_named(make_backbone: Maker):
    backbone = make_backbone()
    for index in (4, -5):
        with pytest.raises(ValueError, match=rf"hidden_layers: .* in \[-4, 3\], got {index}"):
            backbone.denoise(IDS, hidden_layers=(index,))
    with pytest.raises(ValueError, match="mask: expected"):
        backbone(IDS, torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize("tie", [False, True])
def test_gradients_reach_every_parameter_when_trainable(make_backbone: Maker, tie: bool):
    """The padding row of an embedding, too: Dream pads with an end of text that answers have."""
    backbone = make_backbone(trainable=True, tie_embeddings=tie, pad_id=2)
    denoised = backbone.denoise(IDS, columns=torch.tensor([[2, 4], [1, 3]]), hidden_layers=(1,))
    loss = nn.functional.cross_entropy(denoised.logits.flatten(0, 1), torch.tensor([5, 6, 7, 8]))
    (loss + denoised.hidden.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    assert backbone.model.lm_head.weight.grad.abs().sum() > 0
    assert backbone.model.model.embed_tokens.weight.grad[2].abs().sum() > 0


def test_equal_weights_are_saved_as_equal_bytes_and_load_into_float32(
    make_backbone: Maker, tmp_path: Path
):
    for name in ("a", "b"):
        export_model(make_backbone(), tmp_path / name, dtype="bfloat16")
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files.keys() == {"config.json", "model.safetensors"}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    again = HFBackbone(str(tmp_path / "a"))
    assert again.dtype == torch.float32
    rounded = make_backbone().model.lm_head.weight.bfloat16().float()
    assert torch.equal(again.model.lm_head.weight, rounded)


def test_rotary_frequencies_stay_in_float32(make_backbone: Maker, tmp_path: Path):
    """Rounded to bfloat16 (8 bits), a frequency would misplace token 1000 by several positions."""
    backbone = make_backbone()
    expected = backbone.model.model.rotary_emb.inv_freq.clone()
    assert expected.dtype == torch.float32
    export_model(backbone, tmp_path)
    nn.ModuleList([backbone]).to(torch.bfloat16)
    loaded = HFBackbone(str(tmp_path), dtype="bfloat16")
    for cast in (backbone, loaded):
        assert cast.dtype == torch.bfloat16
        assert torch.equal(cast.model.model.rotary_emb.inv_freq, expected)
        assert cast.denoise(IDS).logits.dtype == torch.bfloat16


def test_description_tells_models_apart(
    make_backbone: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backbone = make_backbone(tie_embeddings=True)
    facts = backbone.describe()
    # Per layer: attention 4 * 16 * 16 + 3 * 16 biases, gated MLP 3 * 16 * 24, two norms of 16.
    assert facts["num_parameters"] == 32 * 16 + 3 * (1024 + 48 + 1152 + 32) + 16
    assert facts["weights_sha256"] is None
    monkeypatch.setattr(weights, "SHARD_BYTES", 9000)
    export_model(backbone, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    loaded = HFBackbone(str(tmp_path)).describe()
    assert loaded["config_sha256"] == facts["config_sha256"]
    assert len(shards) > 1
    assert loaded["weights_sha256"] == sha256(b"".join(p.read_bytes() for p in shards)).hexdigest()
    assert make_backbone(shift=1).describe()["config_sha256"] != facts["config_sha256"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "one of path"),
        ({"path": "tiny", "architecture": tiny_architecture()}, "one of path"),
        ({"architecture": tiny_architecture(), "trainable": True, "load_in_4bit": True}, "4bit"),
        ({"architecture": tiny_architecture(), "from_ar": FromAR(shift=1)}, "from_ar"),
        ({"path": "tiny", "attn_implementation": "flex"}, "attn_implementation"),
        ({"path": "tiny", "gradient_checkpointing": "some"}, "gradient_checkpointing"),
    ],
)
def test_options_that_do_not_go_together_are_named(options: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=name):
        HFBackbone(**options)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_block_model_denoises_under_its_block_causal_mask(make_backbone: Maker, padding: str):
    """Blocks of 4 from a row's first token: a change in block 1 moves nothing in block 0."""
    backbone = make_backbone(attention="block", block_size=4)
    sides = {"none": (0, 0), "left": (2, 0), "right": (0, 2)}[padding]
    ids = nn.functional.pad(torch.tensor([[5, 9, 3, 7, 3, 11, 8]]), sides)
    mask = None if padding == "none" else ids != 0
    first, second = (
        backbone.denoise(canvas, pad_mask=mask).logits[ids != 0][:, 4:]  # no forbidden one
        for canvas in (ids, ids.masked_fill(ids == 11, 30))
    )
    torch.testing.assert_close(first[:4], second[:4])
    assert ((first - second)[4:].abs().amax(-1) > 1e-3).all()


def test_blocks_may_count_from_the_response(make_backbone: Maker):
    """A prompt of 3 and blocks of 4: column 3 starts block 0, so it sees columns 0 to 6."""
    backbone = make_backbone(attention="block", block_size=4, block_origin="response")
    ids = torch.tensor([[5, 9, 8, 3, 3, 3, 3, 3]])
    columns = torch.arange(8)
    blocks = torch.div(columns - 3, 4, rounding_mode="floor")
    visible = (blocks[:, None] >= blocks[None])[None, None]
    torch.testing.assert_close(backbone(ids), make_backbone()(ids))  # adds no mask of its own
    expected = backbone(ids, visible)
    expected[..., 3] = float("-inf")
    torch.testing.assert_close(backbone.denoise(ids, response_start=3).logits, expected)


def test_an_unknown_mask_id_stops_decoding_but_not_logits(make_backbone: Maker):
    backbone = make_backbone(mask_id=-1)
    assert backbone.spec.forbidden_ids == ()
    torch.testing.assert_close(backbone(IDS), make_backbone()(IDS))
    with pytest.raises(
        ValueError, match=r"spec\.mask_id: .* give its id as spec_overrides\.mask_id"
    ):
        backbone.denoise(IDS)


def test_what_no_graph_can_hold_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    graphs.explain_eager.cache_clear()
    longer = {"rope_type": "dynamic", "factor": 2.0}
    plain = HFBackbone(architecture=tiny_architecture())
    grown = HFBackbone(architecture=tiny_architecture(rope_scaling=longer))
    assert not plain.graph_safe  # a CPU has none, and nothing is said
    assert not caplog.messages
    with emulated(monkeypatch):
        assert plain.graph_safe
        assert not HFBackbone(architecture=tiny_architecture(), cuda_graphs=False).graph_safe
        assert not caplog.messages
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not plain.graph_safe
            assert not plain.graph_safe
            assert plain.to(torch.bfloat16).graph_safe  # nothing is cast
        assert not grown.graph_safe
    autocast, rope = caplog.messages
    assert autocast == "no CUDA graphs, as autocast casts weights anew: steps run eagerly"
    assert "rotary frequencies depend on the length" in rope
