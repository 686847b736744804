"""Drawing by masked tokens against the release of MMaDA, and what text may hold."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lit_dlm.decoding as d
from lit_dlm.backbones import HFBackbone
from lit_dlm.backbones.resolution import resolve
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.tools.execution import free_running, teacher_forced
from tests.backbones.folders import write
from tests.decoding.states import decoded
from tests.twins import file_shapes
from tests.vision.models import waves

GOLDEN = Path(__file__).parents[1] / "golden" / "mmada.safetensors"
WORDS, CODES, CELLS, STEPS = 60, 32, 16, 6
CONFIG = {
    "model_type": "mmada",
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "vocab_size": WORDS + CODES,
    "embedding_size": WORDS + CODES,
    "max_sequence_length": 128,
    "weight_tying": False,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "mask_token_id": 58,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = [[50, 5, 6, 7, 2, 51], [50, 5, 9, 2, 51]]
WITHOUT = [50, 5, 2, 51]
END = 52


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> HFBackbone:
    weights = {
        name: waves(name, shape) * (3.0 if len(shape) > 1 else 1.0)
        for name, shape in file_shapes(resolve(CONFIG)).items()
    }
    folder = write(tmp_path_factory.mktemp("mmada") / "model", CONFIG, weights)
    return HFBackbone(str(folder), spec_overrides={"text_vocab_size": WORDS}).eval()


@pytest.mark.parametrize(("name", "scale"), [("plain", 0.0), ("guided", 2.5)])
def test_a_drawing_is_that_of_the_release_and_can_be_verified(
    backbone: HFBackbone, name: str, scale: float
):
    """The same noise, in the release's own loop: schedule, noise, guidance and ids.

    16 cells, 6 steps: floor(16 cos(15 k degrees)) masks are left. The cosine of 60 degrees is a
    little less than a half in float32, hence 7 and not 8.
    """
    decoder = Decoder(
        policy=d.NoisyConfidencePolicy(STEPS),
        quota=d.CosineQuota(STEPS),
        sampler=d.Sampler(temperature=1.0, allowed_ids=(WORDS, WORDS + CODES)),
        layout=d.PictureLayout(END),
        guidance=d.Guidance(scale, WITHOUT) if scale else None,
    )
    capture = TrajectoryCapture(vocab_size=backbone.vocab_size)
    result = decoded(decoder, backbone, PROMPTS, CELLS + 1, capture, seed=11)
    assert torch.equal(result.ids[:, -CELLS - 1 : -1] - WORDS, load_file(GOLDEN)[name])
    assert result.ids[:, -1].tolist() == [END, END]
    assert result.num_steps.tolist() == [STEPS, STEPS]
    records = capture.trajectories(["a", "b"])
    states = [records[0].state_at(step) for step in range(1, STEPS + 1)]
    left = [int((state == records[0].mask_id).sum()) for state in states]
    assert left == [15, 13, 11, 7, 4, 0]
    rebuilt = decoder_from_description(decoder.describe())
    assert rebuilt.describe() == decoder.describe()
    for verdict in (
        *teacher_forced(backbone, rebuilt, records),
        *free_running(backbone, rebuilt, records),
    ):
        assert verdict.outcome == "exact", verdict


def test_text_never_holds_picture_tokens(backbone: HFBackbone):
    text = decoded(Decoder(policy=ConfidencePolicy()), backbone, PROMPTS, 12)
    assert int(text.ids[:, -12:].max()) < WORDS
    both = Decoder(policy=ConfidencePolicy(), sampler=d.Sampler(allowed_ids=(0, WORDS + CODES)))
    free = decoded(both, backbone, PROMPTS, 12)
    assert int(free.ids[:, -12:].max()) >= WORDS  # so the bound above did something


def test_guidance_has_no_cache_beside_it():
    with pytest.raises(ValueError, match="guidance"):
        Decoder(policy=ConfidencePolicy(), cache=d.DualCache(), guidance=d.Guidance(1.0, [1]))
