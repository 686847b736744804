"""Reads a policy that was trained with the code of the TraceLock release (arXiv 2605.24697)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lit_dlm.backbones.projection import FeatureSettings, Projector, read_checkpoint
from lit_dlm.system.files import fitting, read_json_object
from lit_dlm.system.options import one_of, refuse
from lit_dlm.tracelock.network import AcceptanceConfig, AcceptanceHead
from lit_dlm.tracelock.scorer import AcceptanceScorer, ScorerSettings

RELEASED = "best_rollout_proxy_f0_5.pt"
_ON = ("use_position_encoding", "use_dynamic_threshold", "use_confidence_feature")
_ONLY = {"model_type": "transformer", "max_gen_len": 256, "use_state_encoding": False}
_ONLY |= dict.fromkeys(_ON, True)
_SIZES = {"width": "d_x", "num_layers": "num_encoder_layers", "num_heads": "num_attention_heads"}
_SIZES |= {"ffn_width": "encoder_ffn_dim", "dropout": "dropout"}
# Names in a layer of torch's encoder, and ours.
_LAYER = {"norm1.": "norm_attention.", "norm2.": "norm_ffn.", "self_attn.in_proj_": "qkv."}
_LAYER |= {"self_attn.out_proj.": "out.", "linear1.": "ffn.0.", "linear2.": "ffn.3."}
# The projection, read from the autoencoder's file, and what replaces features in training.
_UNUSED = ("hidden_norm", "delta_norm", "hidden_proj", "delta_proj", "mask_", "target_mask")


def read_released(folder: Path) -> AcceptanceScorer:
    """Reads ``best_rollout_proxy_f0_5.pt`` with the ``config.json`` and autoencoder beside it.

    The release has neither its network's code nor weights of a policy: sizes and inputs are those
    of its configuration, and what this leaves open is taken as in :mod:`lit_dlm.tracelock.network`.
    Names are those of torch's encoder, which normalises first; other tensors are known by shape.
    """
    path, source = folder / RELEASED, folder / "config.json"
    projector, config = Projector.load(folder / "best_val_loss.pt"), read_json_object(source)
    for name, value in _ONLY.items():
        one_of(value, of=f"{source}: ", **{name: config.get(name)})
    with fitting(path):
        sizes = {ours: config[theirs] for ours, theirs in _SIZES.items()}
        head = AcceptanceConfig(positions="learned", use_state_embedding=False, **sizes)
        features = FeatureSettings(entropy=False, margin=False, log_odds=False)
        settings = ScorerSettings(layout="all", features=features)
        facts = {"hidden_size": projector.config.hidden_size}
        scorer = AcceptanceScorer(projector, head=head, settings=settings, backbone=facts)
        scorer.head.load_state_dict(_renamed(read_checkpoint(path)["model"], scorer.head))
    return scorer.eval()


def _renamed(stored: dict[str, Tensor], head: AcceptanceHead) -> dict[str, Tensor]:
    """Returns the tensors by the names of our network; those without a place keep theirs."""
    found: dict[str, Tensor] = {}
    width = head.config.width
    kinds = {(width, head.num_features): "in_proj", (257, width): "position_table"}
    for name, value in stored.items():
        place, _, leaf = name.rpartition(".")
        shape = tuple(stored.get(f"{place}.weight", value).shape)
        if name.startswith(_UNUSED) or shape == (4, width):  # a table of states, always there
            continue
        is_tau = "threshold" in place or "tau" in place
        heads = {(width,): "final_norm", (1, width): "tau_head" if is_tau else "logit_head"}
        ours = f"{(kinds | heads).get(shape, place)}.{leaf}"
        if "layers." in name:
            ours = f"layers.{name.rpartition('layers.')[2]}"
            for theirs, own in _LAYER.items():
                ours = ours.replace(theirs, own)
        elif leaf not in ("weight", "bias") and value.numel() == width:
            ours, value = "threshold_token", value.flatten()
        if ours in found:
            refuse(RELEASED, f"one {ours}", f"{name} as another")
        found[ours] = value.float()
    return found
