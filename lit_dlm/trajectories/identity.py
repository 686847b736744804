"""What a run was made with, and what is at hand now: named differences between the two.

A record can only be re-executed with the model, tokenizer, decoder and seed that its run names. The
run's description lies in every shard; this module reads it, compares it with a loaded backbone and
tokenizer, and rebuilds the decoders from it.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.ops.noise import sample_seed
from lit_dlm.trajectories.errors import ShardError
from lit_dlm.trajectories.provenance import RunRecord, canonical_json
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import RUN_MEMBER

SAMPLE_SEED_RULE = "63 bits of sha256('{seed}:{uid}')"
"""How a run says that its sample seeds follow from the base seed and the example's uid."""


def run_of_shard(shard: Path) -> tuple[RunRecord, str]:
    """The run record inside a shard, which is its first member.

    Returns:
        The record, and the run digest of its stored text (hexadecimal).

    Raises:
        ShardError: the shard does not begin with a run record.
    """
    with shard.open("rb") as file:
        try:
            info = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise ShardError(f"{shard}: not a tar file: {error}") from error
        if info.name != RUN_MEMBER:
            raise ShardError(f"{shard}: expected the member {RUN_MEMBER} first, got {info.name!r}")
        text = file.read(info.size)
    try:
        return RunRecord.parse(text.decode()), hashlib.sha256(text).digest()[:16].hex()
    except ValueError as error:
        raise ShardError(f"{shard}: {RUN_MEMBER}: {error}") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary and the chat template (hexadecimal).

    Args:
        tokenizer: a tokenizer of transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(f"{text}\0{template}".encode()).hexdigest()


def named_differences(
    recorded: Mapping[str, Any], current: Mapping[str, Any], prefix: str
) -> list[str]:
    """One line for every key that both sides know and that differs.

    Args:
        recorded: a group of the run record.
        current: the same facts as they are now.
        prefix: name of the group, such as ``model``.

    Returns:
        Lines such as ``model.dtype: "float32" recorded, "bfloat16" now``.
    """
    lines = []
    for key in sorted(recorded.keys() & current.keys()):
        old, new = recorded[key], current[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += named_differences(old, new, f"{prefix}.{key}")
        elif canonical_json(old) != canonical_json(new):
            before, after = canonical_json(old), canonical_json(new)
            lines.append(f"{_spoken(prefix, key)}: {before} recorded, {after} now")
    return lines


def _spoken(prefix: str, key: str) -> str:
    """Digests are what people look for: ``model.weights digest`` instead of the key."""
    return (
        f"{prefix}.{key.removesuffix('_sha256')} digest"
        if key.endswith("_sha256")
        else (f"{prefix} digest" if key == "digest" else f"{prefix}.{key}")
    )


def backbone_differences(run: RunRecord, backbone: Backbone) -> list[str]:
    """What tells a backbone from the one of the run: weights, configuration, dtype, special ids."""
    describe = getattr(backbone, "describe", None)
    facts = dict(describe()) if callable(describe) else {"class": type(backbone).__name__}
    spec = backbone.spec
    ids = {"mask_id": spec.mask_id, "pad_id": spec.pad_id, "eos_ids": list(spec.eos_ids)}
    return named_differences(run.model, facts, "model") + named_differences(
        run.tokenizer, ids, "tokenizer"
    )


def tokenizer_differences(run: RunRecord, tokenizer: Any) -> list[str]:
    """Whether a tokenizer has another vocabulary or chat template than that of the run."""
    return named_differences(run.tokenizer, {"digest": tokenizer_digest(tokenizer)}, "tokenizer")


def method_of(record: Trajectory, run: RunRecord) -> str:
    """Name of the decoding method that made a record.

    Raises:
        ValueError: neither the record nor the run says it.
    """
    methods = run.decode.get("methods")
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"trajectory {record.uid!r}: its run record describes no decoder, so it cannot be "
            "executed again (an imported record, for example)"
        )
    name = record.meta.get("method")
    if name is None and len(methods) == 1:
        return str(next(iter(methods)))
    if name not in methods:
        raise ValueError(
            f"trajectory {record.uid!r}: expected meta 'method' to be one of "
            f"{', '.join(methods)}, got {name!r}"
        )
    return str(name)


def rebuilt_decoder(
    run: RunRecord,
    method: str,
    *,
    temperature: float | None = None,
    policy_folders: Sequence[str | Path] = (),
) -> tuple[Decoder, list[str]]:
    """The decoder of one method of a run.

    Args:
        run: the run.
        method: name of the method.
        temperature: use this one instead of the recorded one.
        policy_folders: where learned policies may lie; they are found by digest.

    Returns:
        The decoder, and how it differs from the recorded one.

    Raises:
        ValueError: the description cannot be rebuilt.
    """
    recorded = run.decode["methods"][method]
    try:
        decoder = decoder_from_description(recorded, policy_folders=policy_folders)
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error
    if temperature is None:
        return decoder, []
    decoder = decoder_from_description(
        {**recorded, "sampler": {**recorded["sampler"], "temperature": float(temperature)}},
        policy_folders=policy_folders,
    )
    return decoder, named_differences(recorded, decoder.describe(), f"decode.{method}")


def seeds_of(
    records: Sequence[Trajectory], run: RunRecord, seed: int | None
) -> tuple[list[Trajectory], list[str]]:
    """The records with the noise seeds to execute them with.

    Args:
        records: records of one run.
        run: the run.
        seed: base seed to derive them from; the stored ones when ``None``.

    Returns:
        The records, and what is wrong with their seeds: another base seed than the run's, or
        stored seeds that do not follow from it.
    """
    base = run.randomness.get("seed")
    follows = run.randomness.get("sample_seed") == SAMPLE_SEED_RULE and isinstance(base, int)
    lines = []
    if seed is not None and seed != base:
        lines.append(f"randomness.seed: {canonical_json(base)} recorded, {seed} now")
    elif follows:
        strange = [r.uid for r in records if r.seed != _sample_seed(base, r, run)]
        if strange:
            lines.append(
                f"seed: {len(strange)} records, the first {strange[0]!r}, hold another seed than "
                f"the run's seed {base} gives"
            )
    if seed is None:
        return list(records), lines
    return [replace(r, seed=_sample_seed(seed, r, run)) for r in records], lines


def _sample_seed(base: Any, record: Trajectory, run: RunRecord) -> int:
    """The seed of a record, whose uid is ``{example}@{method}``."""
    return sample_seed(int(base), record.uid.removesuffix(f"@{method_of(record, run)}"))
