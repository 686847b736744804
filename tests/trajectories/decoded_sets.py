"""Real sets of trajectories for tests, decoded by the embedded model."""

from __future__ import annotations

from pathlib import Path

from lit_dlm.backbones import HFBackbone, load_backbone, load_tokenizer
from lit_dlm.decoding import (
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    EntropyPolicy,
    EvenQuota,
    GaussSeidelPolicy,
    MarginPolicy,
    NoQuota,
    PrefixCache,
    Region,
    Sampler,
    ScheduleQuota,
    SlidingWindow,
    TemplateLayout,
    ThresholdPolicy,
    prompt_canvas,
)
from lit_dlm.ops.sampling import sample_seed
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import TrajectoryShardWriter, merge_manifest
from lit_dlm.trajectories.store.provenance import SAMPLE_SEED_RULE, RunRecord, tokenizer_digest

LENGTH = 12
NUM_TEXTS = 4

DECODERS = {
    "confidence": Decoder(policy=ConfidencePolicy()),
    # Counters of blocks, and steps within a block.
    "even": Decoder(policy=EntropyPolicy(), quota=EvenQuota(6), window=BlockWindow(6)),
    # The step number decides how many; some steps commit nothing.
    "schedule": Decoder(
        policy=MarginPolicy(),
        quota=ScheduleQuota(7),
        settings=DecodeSettings(stall_rule="idle", max_steps=7),
    ),
    # Noise, the end-of-text gate and fill, a cap, and a window that slides.
    "drawn": Decoder(
        policy=ThresholdPolicy(0.6),
        quota=NoQuota(),
        window=SlidingWindow(8),
        sampler=Sampler(temperature=0.9),
        settings=DecodeSettings(eos_rule="fill", eos_gate=True, max_commits_per_step=3),
    ),
    # Every step depends on what the cache keeps of earlier ones.
    "cached": Decoder(policy=ConfidencePolicy(), window=BlockWindow(6), cache=PrefixCache()),
    # A step reads which region the one before it wrote; a marker stands in the response.
    "lockstep": Decoder(
        policy=GaussSeidelPolicy(),
        quota=NoQuota(),
        layout=TemplateLayout(
            [Region(name="R", length=6, tau=0.6), Region(name="A", marker=[300], tau=0.6)]
        ),
    ),
}

_TEXTS = (
    "Tom has 34 pens, finds 7, loses 5. How many pens?",
    "Leo has 8 nuts, sells 4. How many nuts?",
    "Write f(xs): sum squares of xs above 3.",
    "Zoe has 8 nuts, gives 6, gets 6. How many nuts?",
)


def tiny() -> HFBackbone:
    return load_backbone("tiny")


def run_record(
    backbone: HFBackbone, decoders: dict[str, Decoder], *, seed: int = 0, batch_size: int = 3
) -> RunRecord:
    spec = backbone.spec
    return RunRecord(
        model=backbone.describe(),
        tokenizer={
            "path": "tiny",
            "digest": tokenizer_digest(load_tokenizer("tiny")),
            "mask_id": spec.mask_id,
            "pad_id": spec.pad_id,
            "eos_ids": list(spec.eos_ids),
        },
        decode={
            "methods": {name: decoder.describe() for name, decoder in decoders.items()},
            "capture": {"level": "signals"},
        },
        randomness={"seed": seed, "sample_seed": SAMPLE_SEED_RULE},
        data={},
        software={},
        hardware={"batch_size": batch_size},
    )


def decoded(
    backbone: HFBackbone, decoder: Decoder, method: str, *, seed: int = 0, batch_size: int = 3
) -> list[Trajectory]:
    """One record per text, in batches of unequal prompts."""
    tokenizer = load_tokenizer("tiny")
    records = []
    for first in range(0, len(_TEXTS), batch_size):
        texts = _TEXTS[first : first + batch_size]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        uids = [f"task/test/{first + row}" for row in range(len(texts))]
        canvas = prompt_canvas(
            [list(prompt) for prompt in prompts],
            response_length=LENGTH,
            spec=backbone.spec,
            seeds=[sample_seed(seed, uid) for uid in uids],
        )
        capture = TrajectoryCapture(vocab_size=backbone.vocab_size, level="signals")
        decoder(backbone, canvas, [capture])
        records += capture.trajectories(
            [f"{uid}@{method}" for uid in uids], [{"task": "task", "method": method}] * len(uids)
        )
    return records


def write_set(folder: Path, records: list[Trajectory], run: RunRecord, **options: int) -> Path:
    with TrajectoryShardWriter(
        folder, name="t", split="test", rank=0, run=run, **options
    ) as writer:
        for record in records:
            writer.put(record)
    merge_manifest(folder)
    return folder


def decoded_set(folder: Path, methods: tuple[str, ...] = tuple(DECODERS)) -> Path:
    """A folder with :data:`NUM_TEXTS` records of every method."""
    backbone = tiny()
    decoders = {name: DECODERS[name] for name in methods}
    records = [
        record for name, decoder in decoders.items() for record in decoded(backbone, decoder, name)
    ]
    return write_set(folder, records, run_record(backbone, decoders), records_per_block=4)
