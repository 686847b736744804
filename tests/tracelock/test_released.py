"""Policies in the files of the TraceLock release, against a network built as they describe it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_dlm.tracelock.policy import TraceLockPolicy, scorer_to_train
from lit_dlm.tracelock.released import RELEASED
from tests.projectors import write_release
from tests.traces import small_backbone

WIDTH, FEATURES = 16, 3 * 4 + 2 * 2 + 1
CONFIG: dict[str, Any] = {
    "model_type": "transformer",
    "d_model": 4096,
    "d_tracelock": 4,
    "d_tracelock_delta": 2,
    "d_x": WIDTH,
    "num_encoder_layers": 2,
    "num_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "dropout": 0.1,
    "max_gen_len": 256,
    "use_position_encoding": True,
    "use_state_encoding": False,
    "use_dynamic_threshold": True,
    "use_confidence_feature": True,
    "use_ae_data": True,
    "precomputed_input_dim": FEATURES,
    "learning_rate": 1e-4,
}


class Reference(nn.Module):
    """Slow: the network that the release's configuration and calls describe, one state at a time.

    A linear map of the features; a table of generation offsets whose row 0 is the prompt's; a token
    for the threshold, appended; torch's own encoder, which normalises first; two linear heads. The
    table of four states and the vector for hidden targets are there though they are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input_proj = nn.Linear(FEATURES, WIDTH)
        self.position_embedding = nn.Embedding(257, WIDTH)
        self.state_embedding = nn.Embedding(4, WIDTH)
        self.mask_embedding = nn.Parameter(torch.randn(WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 24, 0.1, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 1)
        self.threshold_head = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, states: Tensor, seen: Tensor) -> Tensor:
        rows = []
        for x, state, mask in zip(features, states, seen, strict=True):
            offset, places = 0, []
            for one in state.tolist():
                offset += one > 0
                places.append(min(offset, 256) * (one > 0))
            hidden = self.input_proj(x) + self.position_embedding(torch.tensor(places))
            hidden = torch.cat([hidden[mask], self.cls_token[0]])
            hidden = self.encoder(hidden[None])[0]
            row = torch.full((len(x),), torch.nan)
            row[mask] = (self.classifier(hidden[:-1]) - self.threshold_head(hidden[-1])).flatten()
            rows.append(row)
        return torch.stack(rows)


def write(folder: Path, **changes: Any) -> tuple[Any, Reference]:
    """A folder as the page says, and the networks whose random weights it has."""
    _, projection = write_release(folder)
    torch.manual_seed(1)
    reference = Reference().eval()
    for value in reference.parameters():
        nn.init.normal_(value, std=0.5)
    kept = ("hidden_norm", "delta_norm")
    state = {f"{n}.{k}": v for n in kept for k, v in projection[n].state_dict().items()}
    state = {**reference.state_dict(), **state, **changes.pop("state", {})}
    state = {key: value for key, value in state.items() if value is not None}
    train = {"global_step": 3, "best_rollout_proxy_f0_5": 0.5, "best_val_loss": float("inf")}
    torch.save({"model": state, "optimizer": {}, "train_state": train}, folder / RELEASED)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return projection, reference


def test_scores_are_those_of_the_network_that_the_release_describes(tmp_path: Path) -> None:
    """From hidden states and probabilities on; of prompt, written and masked rows, some hidden."""
    networks, reference = write(tmp_path)
    scorer = TraceLockPolicy(tmp_path).scorer
    hidden, prob = torch.randn(3, 9, 3, 12), torch.rand(3, 9)
    parts = [networks["hidden_encoder"](networks["hidden_norm"](hidden[:, :, k])) for k in range(3)]
    parts += [
        networks["delta_encoder"](networks["delta_norm"](hidden[:, :, k + 1] - hidden[:, :, k]))
        for k in range(2)
    ]
    states = torch.tensor(
        [[0] * p + [1] * w + [2] * (9 - p - w) for p, w in ((2, 3), (4, 0), (1, 8))]
    )
    seen = torch.arange(9) < torch.tensor([[9], [7], [9]])
    with torch.no_grad():
        wanted = reference(torch.cat([*parts, prob[..., None]], -1), states, seen)
        found = scorer(scorer.features(hidden, prob), states, seen).decision_logits
    torch.testing.assert_close(found[seen], wanted[seen], atol=1e-4, rtol=1e-4)
    assert scorer.commits.threshold == 0.99
    scorer.save(tmp_path / "ours")
    again = TraceLockPolicy(tmp_path / "ours").scorer
    assert again.digest() == scorer.digest()
    assert not again.settings.features.log_odds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mlp"}, r"config\.json: model_type: expected 'transformer', got 'mlp'"),
        ({"max_gen_len": 512}, r"max_gen_len: expected 256, got 512"),
        ({"use_dynamic_threshold": False}, "use_dynamic_threshold: expected True, got False"),
        ({"d_x": 32}, rf"{RELEASED}: expected what this version reads.*size mismatch"),
        ({"d_x": None}, rf"{RELEASED}: expected what this version reads"),
        ({"state": {"input_proj.weight": torch.zeros(WIDTH, 833)}}, "input_proj.weight"),
        ({"state": {"classifier.bias": None}}, r"Missing key.*logit_head\.bias"),
        ({"state": {"other.weight": torch.zeros(WIDTH)}}, "expected one final_norm.weight, got"),
    ],
)
def test_a_policy_of_other_sizes_is_one_line(tmp_path: Path, changes: Any, message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        TraceLockPolicy(tmp_path).scorer  # noqa: B018 - read at first use
    assert "\n" not in str(refused.value)


def test_a_released_policy_of_another_hidden_width_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    message = r"^acceptance policy: .* backbone with hidden_size=12, got hidden_size=16$"
    with pytest.raises(ValueError, match=message):
        scorer_to_train(small_backbone(), str(tmp_path), None)
    (tmp_path / "best_val_loss.pt").unlink()
    with pytest.raises(ValueError, match=r"projector folder .*best_val_loss\.pt: there is no such"):
        TraceLockPolicy(tmp_path).scorer  # noqa: B018 - read at first use
