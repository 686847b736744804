"""Real sets of trajectories for tests, decoded by the embedded model."""

from collections.abc import Mapping
from pathlib import Path

from lit_dlm import decoding
from lit_dlm.backbones import HFBackbone, load_tokenizer
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, decode, prompt_canvas
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import merge_manifest
from lit_dlm.trajectories.store.provenance import SAMPLE_SEED_RULE, RunRecord, tokenizer_digest
from tests.trajectories.samples import run_record, write_shards

LENGTH = 12
NUM_TEXTS = 4

DECODERS = {
    "confidence": Decoder(policy=decoding.ConfidencePolicy()),
    # Counters of blocks, and steps within a block.
    "even": Decoder(
        policy=decoding.EntropyPolicy(), quota=decoding.EvenQuota(6), window=decoding.BlockWindow(6)
    ),
    # The step number decides how many; some steps commit nothing.
    "schedule": Decoder(
        policy=decoding.MarginPolicy(),
        quota=decoding.ScheduleQuota(7),
        settings=DecodeSettings(stall_rule="idle", max_steps=7),
    ),
    # Memory of former steps.
    "klass": Decoder(
        policy=decoding.KLASSPolicy(0.6, max_kl=0.1),
        quota=NoQuota(),
        window=decoding.BlockWindow(6),
    ),
    "credit": Decoder(policy=decoding.CreditPolicy(0.6), quota=NoQuota()),
    # Tokens that are taken back.
    "wino": Decoder(policy=decoding.WINOPolicy(0.3), quota=NoQuota()),
    "remdm": Decoder(policy=decoding.ReMDMPolicy(2, loop_steps=3), window=decoding.BlockWindow(6)),
    # Noise, the end-of-text gate and fill, a cap, and a window that slides.
    "drawn": Decoder(
        policy=decoding.ThresholdPolicy(0.6),
        quota=NoQuota(),
        window=decoding.SlidingWindow(8),
        sampler=decoding.Sampler(temperature=0.9),
        settings=DecodeSettings(eos_rule="fill", eos_gate=True, max_commits_per_step=3),
    ),
}

_TEXTS = (
    "Tom has 34 pens, finds 7, loses 5. How many pens?",
    "Leo has 8 nuts, sells 4. How many nuts?",
    "Write f(xs): sum squares of xs above 3.",
    "Zoe has 8 nuts, gives 6, gets 6. How many nuts?",
)


def write_set(folder: Path, records: list[Trajectory], run: RunRecord) -> Path:
    write_shards(folder, records, split="test", run=run, records_per_block=4)
    merge_manifest(folder)
    return folder


def decoded_set(
    folder: Path, decoders: Mapping[str, Decoder], backbone: HFBackbone, *, batch_size: int = 3
) -> Path:
    """A folder with :data:`NUM_TEXTS` records of every method, from batches of unequal prompts."""
    tokenizer, spec, records = load_tokenizer("tiny"), backbone.spec, []
    for method, decoder in decoders.items():
        for first in range(0, NUM_TEXTS, batch_size):
            texts = _TEXTS[first : first + batch_size]
            turns = [[{"role": "user", "content": text}] for text in texts]
            uids = [f"task/test/{first + row}" for row in range(len(turns))]
            canvas = prompt_canvas(
                tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False),
                response_length=LENGTH,
                spec=spec,
                seeds=[sample_seed(0, uid) for uid in uids],
            )
            capture = TrajectoryCapture(vocab_size=backbone.vocab_size, level="signals")
            decode(backbone, decoder, canvas, [capture])
            records += capture.trajectories(
                [f"{uid}@{method}" for uid in uids],
                [{"task": "task", "method": method}] * len(uids),
            )
    run = run_record(
        model=backbone.describe(),
        tokenizer={
            "path": "tiny",
            "digest": tokenizer_digest(tokenizer),
            "mask_id": spec.mask_id,
            "pad_id": spec.pad_id,
            "eos_ids": list(spec.eos_ids),
        },
        decode={
            "methods": {name: decoder.describe() for name, decoder in decoders.items()},
            "capture": {"level": "signals"},
        },
        randomness={"seed": 0, "sample_seed": SAMPLE_SEED_RULE},
        hardware={"batch_size": batch_size},
    )
    return write_set(folder, records, run)
