"""Training on prompts with pictures: the same as with embeddings put together by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones.export import export_model, save_adapter
from lit_dlm.backbones.hf import HFBackbone
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.projection import ProjectorConfig
from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.datamodules.supervised_sources import ModelFacts, RecordedDecodes, RecordedPairs
from lit_dlm.decoding import ConfidencePolicy, Decoder, FixedQuota
from lit_dlm.finetuning.sft import SFTModule
from lit_dlm.predict.decode import image_facts
from lit_dlm.rl.rollout import DecodingEngine, rollout_prompts
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.rl.step import shard_samples
from lit_dlm.tasks import PromptExample
from lit_dlm.tensors.fused_head import TokenStats
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.states import collate_states
from lit_dlm.training.batch import SupervisedBatch, SupervisedExample
from lit_dlm.training.masking import RandomMasking, SemiAutoregressive, TraceMasking
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.vision.base import PromptPictures, VisionSettings, add_pictures, insert_pictures
from lit_dlm.vision.pictures import PictureFolder
from lit_dlm.vision.tower import TowerVision
from tests import rollouts
from tests.decoding.states import decoded
from tests.finetuning.runs import Data, G, run, two_processes
from tests.processes import in_two_processes
from tests.projectors import random_orthogonal
from tests.traces import write_shards
from tests.training.supervised import batch_of, sft, slow_log_probs, tabom
from tests.vision.models import SMALL, VOCAB, picture, write_seeing

PICTURES = [picture(50, 40), picture(30, 90)]
SHOWN = [[0], [], [1, 0], [0]]
LORA = LoRASettings(rank=2, targets="all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("llada_v") / "model", vision_config=SMALL)


def model_of(folder: Path, train: Any, **options: Any) -> HFBackbone:
    """With an adapter beside a projector, or wholly trained."""
    options = {"projector": {"lora": LORA}, "all": {"trainable": True}}.get(train, options)
    backbone = HFBackbone(str(folder), vision=VisionSettings(train=train), **options).eval()
    for number, one in enumerate(PICTURES):
        add_pictures(backbone, f"sample {number}", [one])
    return backbone


def examples(backbone: HFBackbone) -> list[SupervisedExample]:
    """One picture, none, two, and the first one again, in prompts of different lengths."""
    rng = np.random.default_rng(0)
    found = []
    for number, which in enumerate(SHOWN):
        shown = [PICTURES[one] for one in which]
        count = sum(map(backbone.vision.num_ids, shown))
        words = rng.integers(3, 100, 2 + number).tolist()
        prompt = [words[0], *range(VOCAB, VOCAB + count), *words[1:]]
        digests = tuple(one.digest for one in shown)
        found.append(
            SupervisedExample(
                uid=f"u{number}",
                prompt_ids=np.array(prompt, np.int32),
                response_ids=rng.integers(3, 100, G).astype(np.int32),
                steps=rng.permutation(G).astype(np.int32),
                pictures=PromptPictures(digests=digests, first_id=VOCAB) if digests else None,
            )
        )
    return found


def rows_by_hand(vision: TowerVision, digests: tuple[str, ...]) -> Tensor:
    """All rows of the pictures of a prompt."""
    found = [torch.empty(0, len(vision.newline))]
    for digest in digests:
        one = next(one for one in PICTURES if one.digest == digest)
        tiles = vision.scheme.tiles(one.decoded())
        seen = vision.tower.encoder(inputs_embeds=vision.tower.embeddings(tiles)).last_hidden_state
        found.append(vision.scheme.merged(vision.projector(seen), vision.newline, one.size))
    return torch.cat(found)


def loss_by_hand(
    model: SFTModule, batch: SupervisedBatch, given: list[SupervisedExample]
) -> Tensor:
    """One unpadded row at a time from embeddings, every logit in memory."""
    backbone = model.backbone

    def forward(canvas: Tensor, row: int) -> Tensor:
        ids = torch.cat([torch.from_numpy(given[row].prompt_ids).long(), canvas[-G:]])
        embeds = backbone.model.model.embed_tokens(ids.clamp_max(VOCAB - 1))
        if (shown := given[row].pictures) is not None:
            pictures = rows_by_hand(backbone.vision, shown.digests)
            embeds = embeds.index_put(((ids >= VOCAB).nonzero()[:, 0],), pictures)
        hidden = backbone.model.model(inputs_embeds=embeds[None], use_cache=False)[0][0]
        logits = backbone.model.lm_head(hidden)
        logits[:, backbone.spec.mask_id] = -torch.inf
        return logits

    states, log_probs = slow_log_probs(model, batch, forward)
    picked = log_probs[states.supervised]
    targets = batch.ids[states.response, batch.start :][states.supervised]
    ce = -picked.gather(1, targets[:, None])[:, 0]
    entropy = -(picked.exp() * picked.clamp_min(-1e9)).sum(-1)
    return model.loss_terms(batch, states, TokenStats(ce, entropy, ce > 1e9)).total


def gradients(model: SFTModule, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


METHODS: dict[str, Any] = {
    "random": lambda backbone: sft(RandomMasking(copies=2), backbone),
    "semi-ar": lambda backbone: sft(SemiAutoregressive(block_size=3), backbone),
    "trace": lambda backbone: sft(TraceMasking(shrink=2), backbone),
    "tabom": lambda backbone: tabom(backbone, rank_window=4),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("train", ["projector", "all"])
def test_loss_and_gradients_are_those_of_embeddings_put_together_by_hand(
    folder: Path, method: str, train: str
) -> None:
    model = METHODS[method](model_of(folder, train))
    given = examples(model.backbone)
    batch = batch_of(model, given)
    assert [len(shown) for shown in batch.pictures] == [1, 0, 2, 1]
    found, expected = model.terms(batch).total, loss_by_hand(model, batch, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model, found), gradients(model, expected)
    assert ours.keys() == theirs.keys()
    assert any(float(g.abs().max()) > 1e-6 for n, g in ours.items() if ".projector." in n)
    assert any(".tower." in name for name in ours) == (train == "all")
    for name, gradient in ours.items():  # sums in another order
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-4 * scale + 1e-7)


def problems() -> list[PromptExample]:
    """With the pictures of :func:`examples`."""
    return [
        PromptExample(uid=f"p{n}", task="t", text="?", images=tuple(PICTURES[one] for one in which))
        for n, which in enumerate(SHOWN)
    ]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_rl_scores_the_states_of_the_rollout(folder: Path, kind: Any) -> None:
    """Old log-probabilities are those that the sampler drew with, from the table of a decode."""
    backbone = model_of(folder, "none", lora=LORA)
    own = model_of(folder, "none", trainable=True) if kind == "full" else None
    value = ValueObjective(backbone=kind, lora=LoRASettings(rank=2))
    rl = rollouts.module(backbone, value=value, value_backbone=own, num_padding=None).eval()
    rl.tokenizer = load_tokenizer("tiny")  # of more tokens than the model has
    encoded = [
        (problem, given.prompt_ids.tolist())
        for problem, given in zip(problems(), examples(backbone), strict=True)
    ]
    prompts = rollout_prompts(encoded, method="random", num_responses=2, response_length=G)
    engine = DecodingEngine(rl, method="random", response_length=G, batch_size=3)
    with torch.inference_mode():  # as Lightning validates; what is kept is used in training
        records = [
            rollout.trajectory.with_meta(rl_step=0, reward=float(number % 2), kept=True)
            for number, rollout in enumerate(engine.generate(prompts))
        ]
    assert [len(record.meta.get("images", ())) for record in records] == [1, 1, 0, 0, 2, 2, 1, 1]
    assert records[0].prompt_ids[1:4].tolist() == [VOCAB, VOCAB + 1, VOCAB + 2]
    samples, _ = rollouts.advantaged(rl, records)
    batches = shard_samples(samples.size.numpy(), batch_size=4)
    samples, sums = rollouts.with_old_scores(rl, batches, samples)
    mismatch, _, count = sums.tolist()
    assert count > 20
    assert mismatch / count < 1e-5
    batch = samples.select(torch.arange(len(samples)))
    assert rl.score(batch).log_prob.detach().allclose(batch.tokens.old_log_prob, atol=1e-5)
    rl.training_step(batch).backward()
    assert all(p.grad is not None for group in rl.parameter_groups() for p in group)


def recorded(backbone: HFBackbone) -> list[Trajectory]:
    """Greedy decodes of :func:`problems`, from the table."""
    decoder = Decoder(policy=ConfidencePolicy(), quota=FixedQuota(2))
    capture = TrajectoryCapture(vocab_size=VOCAB)
    prompts = [
        insert_pictures(
            backbone, given.prompt_ids.tolist(), given.pictures.digests if given.pictures else ()
        )
        for given in examples(backbone)
    ]
    decoded(decoder, backbone, prompts, G, capture)
    return capture.trajectories(
        [f"t/train/{number}@m" for number in range(4)], list(map(image_facts, problems()))
    )


def test_a_trace_shows_what_its_decode_saw_or_the_picture_is_named(
    folder: Path, tmp_path: Path
) -> None:
    """A greedy decode commits its proposals, so at each step the written cells have label 1."""
    source = model_of(folder, "none")
    records = recorded(source)
    config = ProjectorConfig(hidden_size=64, hidden_rank=8, delta_rank=4, kind="random_orthogonal")
    projector = random_orthogonal(config, seed=5)
    tracelock = TraceLockModule(source, tokenizer="tiny", projector=projector)
    for step in range(records[0].num_steps):
        batch = collate_states(records, [record.state_at(step) for record in records])
        label = tracelock.observe(batch).label
        for row, record in enumerate(records):
            assert label[row, torch.from_numpy(record.committed_at(step))].all()
    shards = write_shards(tmp_path / "traces", records)
    pictures = PictureFolder(shards / "pictures")
    for one in PICTURES:
        pictures.add(one)

    def read(vision: VisionSettings | None) -> SupervisedBatch:
        backbone = HFBackbone(str(folder), vision=vision)
        tokenizer, spec = load_tokenizer("tiny"), backbone.spec
        facts = ModelFacts(tokenizer=tokenizer, spec=spec, vocab_size=VOCAB, backbone=backbone)
        given = list(RecordedDecodes(shards, only_correct=False).examples(facts))
        batch = batch_of(backbone, given)
        sft(backbone=backbone).terms(batch)
        return batch

    assert [len(shown) for shown in read(VisionSettings()).pictures] == [1, 0, 2, 1]
    with pytest.raises(ValueError, match=r"t/train/0@m: .* expected a model that sees them"):
        read(None)
    file = pictures.folder / PICTURES[0].digest
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=rf"t/train/0@m: {file}: the picture is damaged"):
        read(VisionSettings())
    file.unlink()
    with pytest.raises(ValueError, match=rf"t/train/0@m: {file}: expected a picture, found no"):
        read(VisionSettings())


def test_pairs_of_decodes_find_their_pictures(folder: Path, tmp_path: Path) -> None:
    first, *_ = recorded(model_of(folder, "none"))
    graded = [
        replace(first, uid=f"t/train/0#{number}@m", meta={**first.meta, "correct": number == 0})
        for number in range(2)
    ]
    shards = write_shards(tmp_path / "traces", graded)
    PictureFolder(shards / "pictures").add(PICTURES[0])
    backbone = HFBackbone(str(folder), vision=VisionSettings())
    tokenizer, spec = load_tokenizer("tiny"), backbone.spec
    facts = ModelFacts(tokenizer=tokenizer, spec=spec, vocab_size=VOCAB, backbone=backbone)
    (pair,) = RecordedPairs(shards).examples(facts)
    (shown,) = batch_of(backbone, [pair]).pictures[0]
    assert shown == PICTURES[0].digest


def test_what_was_trained_is_exported_in_the_familys_layout(folder: Path, tmp_path: Path) -> None:
    """As a whole model, and beside an adapter that leaves the tower alone."""
    backbone = model_of(folder, "projector")
    assert not any("lora" in name for name, _ in backbone.vision.named_parameters())
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
            assert ".lora_" in name or "vision.projector." in name or name == "vision.newline"
    batch = batch_of(backbone, examples(backbone))

    def loss(model: HFBackbone) -> Tensor:
        return sft(backbone=model).terms(batch).total.detach()

    expected = loss(backbone)
    save_adapter(backbone, tmp_path / "adapter")
    export_model(backbone, tmp_path / "whole")
    changed = model_of(folder, "none")
    assert not loss(changed).allclose(expected, atol=1e-3)
    changed.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(loss(changed), expected)
    save_adapter(changed, tmp_path / "copy")  # of an adapter that is not trained further
    again = model_of(folder, "none")
    again.load_adapter(str(tmp_path / "copy"))
    torch.testing.assert_close(loss(again), expected)
    torch.testing.assert_close(loss(model_of(tmp_path / "whole", "none")), expected)
    # Gone on from, it stays in float32 beside a decoder in half precision.
    options: Any = {"dtype": "bfloat16", "vision": VisionSettings(train="projector")}
    vision = HFBackbone(
        str(folder), adapter=str(tmp_path / "adapter"), trainable=True, **options
    ).vision
    assert vision is not None
    trained = load_file(tmp_path / "adapter" / "vision.safetensors")
    assert len(trained) == 5  # two layers and the end of a line
    for key, weight in trained.items():
        assert torch.equal(vision.stored_weights()[key], weight), key
    with pytest.raises(ValueError, match=r"vision.safetensors: expected HFBackbone.vision"):
        HFBackbone(str(folder), adapter=str(tmp_path / "adapter"))


def _train(rank: int, kind: str, count: int, folder: Path, out: Path, train: str) -> None:
    """One update, saved, and another one."""
    for steps, resume in ((1, None), (2, out / "run.ckpt")):
        torch.manual_seed(0)
        model = sft(
            backbone=model_of(folder, train),
            loss_norm="global",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.5),
            export_dir=str(out / "exported"),
        )
        strategy = two_processes(kind) if count > 1 else "auto"
        data = Data(examples(model.backbone), batch_size=4 // count)
        run(model, data, out, steps=steps, resume=resume, devices=count, strategy=strategy)


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize(
    ("kind", "train"), [("ddp", "projector"), ("fsdp", "all"), ("fsdp", "projector")]
)
def test_two_processes_train_as_one_and_go_on(
    folder: Path, tmp_path: Path, kind: str, train: str
) -> None:
    """One of them has a batch with a picture and one without."""
    _train(0, kind, 1, folder, tmp_path / "1", train)
    in_two_processes(_train, kind, 2, folder, tmp_path / "2", train)
    one, two = (
        torch.load(tmp_path / count / "run.ckpt", weights_only=True)["state_dict"]
        for count in ("1", "2")
    )
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    assert any("vision.tower" in name for name in one) == (train == "all")
    before = dict(model_of(folder, "none").named_parameters())
    path = tmp_path / "2" / "exported"
    whole = {"path": str(path)} if train == "all" else {"path": str(folder), "adapter": str(path)}
    exported = dict(HFBackbone(**whole, vision=VisionSettings()).named_parameters())
    names = [name for name in before if "vision.projector" in name]
    assert names
    for name in names:
        moved = one[f"backbone.{name}"] - before[name]
        assert float(moved.abs().max()) > 1e-3
        torch.testing.assert_close(exported[name], two[f"backbone.{name}"])
