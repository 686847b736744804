"""Plans: counts by hand at small and released sizes, what headers say, runs that cannot fit."""

import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import lit_dlm.datamodules
from cli import main
from lit_dlm.backbones import resolution
from lit_dlm.backbones.experts import Experts
from lit_dlm.commands.memory import GIB, Plan, advice, check_run, plan_of
from lit_dlm.config.files import compose, experiments, find, resolved
from tests.twins import write_descriptions

V, D, INNER, LAYERS = 1000, 64, 128, 6
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": INNER, "num_layers": LAYERS,
    "num_heads": 4, "num_kv_heads": 2, "mask_id": 3, "pad_id": 0, "eos_ids": [1],
}  # fmt: skip
LAYER = 2 * D * D + 2 * D * D // 2 + (D + 2 * D // 2) + 3 * D * INNER + 2 * D
PARAMETERS = 2 * V * D + LAYERS * LAYER + D
"""Embedding and head; q, o, k, v, their biases, feed-forward and norms of a layer; last norm."""
SHARDED = {"strategy": {"class_path": "lit_dlm.training.sharding.ShardedStrategy"}}


@pytest.fixture(autouse=True)
def releases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations of releases as if the hub had told them."""
    locate = write_descriptions(tmp_path_factory.mktemp("hub"))
    monkeypatch.setattr(resolution, "locate", locate)


def config(
    *, data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **backbone: Any
) -> dict[str, Any]:
    sizes = {**SIZES, **backbone.pop("sizes", {})}
    options = {"architecture": sizes, "dtype": "float32", **backbone}
    given = {"batch_size": 4, "max_prompt_length": 20, "response_length": 30}
    model = {
        "backbone": {"class_path": "HFBackbone", "init_args": options},
        "optimizer": {"class_path": "torch.optim.AdamW"},
        "decoders": {"one": {"init_args": {"cache": {"class_path": "PrefixCache"}}}},
    }
    return {
        "model": {"class_path": "SFTModule", "init_args": model},
        "data": {"class_path": "SupervisedDataModule", "init_args": {**given, **(data or {})}},
        "trainer": {"accelerator": "cpu", "devices": 1, **(trainer or {})},
    }


def of(options: dict[str, Any]) -> Plan:
    plan = plan_of(options)
    assert plan is not None
    return plan


def planned(**options: Any) -> Plan:
    return of(config(**options))


def shipped(*words: str) -> Plan:
    """The plan of a packaged experiment; what it leaves out of its data are the defaults."""
    merged: Any = resolved(compose(words, "base").document)
    kind = merged["data"]["class_path"].rpartition(".")[2]
    options = inspect.signature(getattr(lit_dlm.datamodules, kind)).parameters.values()
    defaults = {one.name: one.default for one in options if one.default is not one.empty}
    merged["data"]["init_args"] = {**defaults, **merged["data"].get("init_args", {})}
    return of(merged)


def activations(**options: Any) -> int:
    return planned(trainable=True, **options).training["activations"]


def test_weights_gradients_and_states_are_counted_by_shapes() -> None:
    plan = planned(trainable=True)
    assert plan.num_parameters == plan.num_trained == PARAMETERS
    size = 4 * PARAMETERS
    assert plan.split == {"weights": size, "gradients": size, "optimiser states": 2 * size}
    assert plan.elsewhere == {"on disk, a checkpoint": 3 * size}
    assert plan.least(8) == 4 * size  # every process has all of it
    options = config(trainable=True)
    options["model"]["init_args"]["optimizer"]["class_path"] = "bitsandbytes.optim.AdamW8bit"
    assert of(options).split["optimiser states"] == 2 * PARAMETERS


def test_an_adapter_trains_its_own_weights_in_float32() -> None:
    """Rank 2 on q (D to D) and v (D to D / 2) of every layer, on a base in bfloat16."""
    plan = planned(dtype="bfloat16", lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    trained = LAYERS * 2 * (2 * D + D + D // 2)
    assert plan.num_trained == trained
    assert plan.split["weights"] == 2 * PARAMETERS + 4 * trained
    assert plan.split["optimiser states"] == 8 * trained
    packed = LAYERS * (2 * D * D + 2 * D * D // 2 + 3 * D * INNER)  # half a byte instead of two
    plan = planned(dtype="bfloat16", lora={"targets": "attn"}, load_in_4bit=True)
    weights = 2 * (PARAMETERS - packed) + packed // 2
    assert plan.split["weights"] == weights + 4 * plan.num_trained


@pytest.mark.parametrize("recompute", [False, True])
def test_all_experts_are_counted_and_those_adapted_again(recompute: bool) -> None:
    """Eight of width 16 a layer in place of the feed-forward, of which a token meets two.

    Rank 2 on each expert's gate and up in one, and on its down; peft adds them to all the experts.
    """
    experts = Experts(number=8, per_token=2, width=16)
    sizes = {"decoder": "qwen3_moe", "experts": experts}
    lora = {"rank": 2, "targets": ["gate_proj", "up_proj", "down_proj"]}
    plan = planned(sizes=sizes, lora=lora, gradient_checkpointing=recompute)
    layer = 2 * D * D + 2 * D * D // 2 + 2 * D + 2 * (D // 4)  # no biases, norms of q and k
    layer += 8 * 3 * D * 16 + 8 * D
    trained = LAYERS * 8 * 2 * ((D + 2 * 16) + (16 + D))
    assert plan.num_parameters == 2 * V * D + LAYERS * layer + D + trained
    assert plan.num_trained == trained
    held = 4 * 8 * 3 * D * 16 * (1 if recompute else LAYERS)
    assert plan.training["experts with their adapter"] == held


def test_states_of_a_bound_are_rows_and_pairs_have_two_responses() -> None:
    bound = {"class_path": "BoundViews", "init_args": {"num_states": 3, "coupled": True}}
    for data, model in (
        ({"responses_per_prompt": 8}, {"masking": bound}),
        ({}, {"num_states": 3}),
    ):
        plain, options = (config(data=data, trainable=True) for _ in range(2))
        options["model"]["init_args"] |= model
        wanted = 6 * of(plain).training["activations"]
        assert of(options).training["activations"] == wanted


def test_hybrid_fine_tuning_scores_next_tokens_too() -> None:
    """4 rows of 30 targets, at 12 bytes of each of 64 numbers and 8 of each of 1,000 logits."""
    plain, options = (config(trainable=True) for _ in range(2))
    options["model"]["class_path"] = "HybridModule"
    one, both = (of(each).training["head"] for each in (plain, options))
    assert both - one == 4 * 30 * (12 * D + 8 * V)


def test_sharding_divides_what_is_trained_and_gathers_two_layers_and_the_ends() -> None:
    plan = planned(trainable=True, trainer=SHARDED)
    assert plan.least(1) == 16 * PARAMETERS
    assert plan.least(8) == 2 * PARAMETERS
    assert plan.most(1) - plan.most(8) == 14 * PARAMETERS
    assert plan.training["gathered weights"] == 4 * (2 * LAYER + 2 * V * D + D)


def test_autocast_copies_whole_weights_but_not_gathered_ones() -> None:
    mixed = {"precision": "bf16-mixed"}
    assert planned(trainable=True, trainer=mixed).training["bfloat16 weights"] == 2 * PARAMETERS
    sharded = planned(trainable=True, trainer={**mixed, **SHARDED}).training
    assert "bfloat16 weights" not in sharded
    assert sharded["gathered weights"] == 2 * (2 * LAYER + 2 * V * D + D)


@pytest.mark.parametrize(
    ("recompute", "lora", "width"),
    [
        (True, None, D),  # its input
        # and the products: q, k, v, attention, o; gate, up and down
        ("selective", None, D + (D + D // 2 + D // 2 + D + D) + (2 * INNER + D)),
        # inputs of two norms and of products; q, k, v and output; gate, SiLU, up and their product
        (False, None, 2 * D + 2 * D + 4 * D + 4 * INNER),
        # an adapter is added to a product in place, and has the input of its layer
        ("selective", "all", D + (D + D // 2 + D // 2 + D + D) + (2 * INNER + D)),
        (False, "all", 2 * D + 2 * D + 4 * D + 4 * INNER),
        (False, ["q_proj", "v_proj"], 2 * D + D + 4 * D + 3 * INNER),
    ],
)
def test_a_further_layer_keeps_what_its_mode_says(
    recompute: bool | str, lora: Any, width: int
) -> None:
    """4 rows of 50 tokens in float32."""
    model = {"lora": {"targets": lora}} if lora else {"trainable": True}
    few, many = (
        planned(gradient_checkpointing=recompute, sizes={"num_layers": layers}, **model).training[
            "activations"
        ]
        for layers in (6, 16)
    )
    assert many - few == 10 * 4 * 50 * width * 4


def test_every_third_layer_is_recomputed_and_more_rows_take_more() -> None:
    whole, third = (activations(gradient_checkpointing=mode) for mode in (False, 3))
    # Of six layers two keep their input alone; one of the two is whole while it is computed again.
    assert whole - third == 4 * 50 * 4 * ((8 * D + 4 * INNER) - 2 * D)

    assert activations(data={"batch_size": 8}) == 2 * activations(data={"batch_size": 4})


@pytest.mark.parametrize(
    ("model", "percent"), [({"trainable": True}, 33), ({"lora": {"targets": "attn"}}, 50)]
)
def test_keeping_products_is_advised_where_they_fit(
    model: dict[str, Any], percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tokens: each keeps q, k, v, attention, o, gate, up and down of six layers.

    Of recomputed layers one at a time is whole, which has its input and so all that is kept of it.
    """
    data = {"batch_size": 20_000}
    whole = config(gradient_checkpointing=True, data=data, **model)
    plan = of(whole)
    more = 6 * 10**6 * 4 * ((D + D // 2 + D // 2 + D + D) + (2 * INNER + D))
    sizes = f"{(plan.most() + more) / GIB:.3g} GiB on each of 1 instead of {plan.most() / GIB:.3g}"
    told = f"true multiplies {percent} % more than selective, which takes {sizes}"
    for capacity, line in ((None, told), (plan.most() + more, told), (plan.most(), None)):
        monkeypatch.setattr("lit_dlm.commands.memory.device_bytes", lambda _, size=capacity: size)
        expected = line and f"gradient_checkpointing: {line}"
        assert advice(whole, plan) == expected
    elsewhere = config(
        gradient_checkpointing=True, data=data, trainer={"accelerator": "auto"}, **model
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert advice(elsewhere, of(elsewhere)) is not None
    for choice in (False, "selective"):
        other = config(gradient_checkpointing=choice, data=data, **model)
        assert advice(other, of(other)) is None


def test_decoding_counts_caches_and_logits() -> None:
    """4 rows of 50 columns, keys and values of 2 heads of 16 and last rows; logits of 30 cells."""
    options = config()
    options["data"]["class_path"] = "PromptDataModule"
    plan = of(options)
    assert (plan.num_trained, plan.training) == (0, {})
    assert plan.decoding["caches"] == 4 * 50 * (2 * LAYERS * 32 + D) * 4
    assert plan.decoding["logits"] == 4 * 30 * V * (4 + 48)
    model = options["model"]["init_args"]
    decoder = model["decoders"].popitem()[1]
    assert "caches" not in of(options).decoding
    model["sweep"] = {"swept": {"class_path": "Sweep", "init_args": {"decoder": decoder}}}
    assert of(options).decoding == plan.decoding


def test_windows_of_rollouts_are_planned_and_not_what_they_replace() -> None:
    run = config()
    run["model"]["init_args"]["windows"] = {"whole": {}, "cache": {"cache": "PrefixCache"}}
    assert of(run).decoding == of(config()).decoding
    del run["model"]["init_args"]["windows"]["cache"]
    assert "caches" not in of(run).decoding


def test_decoding_on_a_gpu_counts_graphs_and_a_column_for_their_padding() -> None:
    """The same in bfloat16: a forward of 200 tokens, its logits and a copy; 48 small results."""
    gpu: Any = {"accelerator": "gpu"}

    def decoding(trainer: dict[str, Any], **backbone: Any) -> dict[str, int]:
        features = {"level": "features"}
        options = config(data=features, trainer=trainer, **{"dtype": "bfloat16", **backbone})
        options["data"]["class_path"] = "PromptDataModule"
        return of(options).decoding

    parts = decoding(gpu)
    assert parts["caches"] == 4 * 51 * (2 * LAYERS * 32 + D) * 2
    assert parts["three hidden states"] == 3 * 4 * 50 * 3 * D * 2
    pool = 200 * 3 * (D + INNER) * 2 + 4 * 30 * V * (2 + 48 + 2)
    assert parts["graphs"] == pool + 48 * (16 * 2**20 + 200 * 48)
    long = decoding(gpu, sizes={"vocab_size": 2 * V})["graphs"] - parts["graphs"]
    assert long == 4 * 30 * V * (2 + 48 + 2)
    # Not on a CPU, with an option, with masks in attention, and where weights are made anew.
    eager: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"accelerator": "cpu"}, {}),
        (gpu, {"cuda_graphs": False}),
        (gpu, {"dtype": "float32"}),
        (gpu, {"load_in_4bit": True}),
        ({**gpu, **SHARDED}, {}),
        ({**gpu, "precision": "bf16-mixed"}, {"dtype": "float32"}),
    ]
    assert not [case for case in eager if "graphs" in decoding(case[0], **case[1])]


DREAM = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584)
DREAM += 2 * 152064 * 3584 + 3584
SDAR_8B = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
SDAR_8B += 2 * 151936 * 4096 + 4096
SDAR_4B = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128)
SDAR_4B += 2 * 151936 * 2560 + 2560
"""Parameters: q and o, k and v, biases of Dream's, feed-forward, norms; embedding, head, norm."""


def test_released_sizes_are_as_counted_by_hand() -> None:
    """Five runs in bfloat16 or its autocast, each at its dearest moment, in bytes."""
    by_hand = {
        # While eight processes decode: 16 bytes of a parameter split, whole weights, the cache of
        # 64 rows of 784 + 2,000 cells (36 layers, keys and values of 8 heads of 128; last rows of
        # 4,096), 16,384 tokens of prompts and two blocks of 4 in every row through a feed-forward,
        # and logits of a block in every row.
        "tracerl_sdar": 16 * SDAR_8B // 8
        + 2 * SDAR_8B
        + 64 * 2784 * (36 * 2 * 8 * 128 * 2 + 4096 * 2)
        + (16384 + 64 * 2 * 4) * 3 * (4096 + 12288) * 2
        + 64 * 4 * 151936 * 2
        + 640_000_000,
        # A step on 8 rows of 256 + 256 tokens; adapters of rank 16 on q and v, with gradient, two
        # moments and a bucket. 28 inputs of layers; one layer: the inputs of its norms, of both
        # adapters at once, query, key, value and output, three of the feed-forward; in its backward
        # three of them. 256 cells of each row meet the head, 32 M logits at a time.
        "tabom_dream_prm12k": 2 * DREAM
        + 20 * 28 * 16 * (3584 + 3584 + 3584 + 512)
        + 4096 * 28 * 3584 * 2
        + 4096 * 2 * (2 * 3584 + 3584 + 4 * 3584 + 3 * 18944)
        + 4096 * (2 * 3584 + 3 * 2 * 18944)
        + 4096 * 3 * 3584 * 2
        + 2048 * 3584 * 8
        + 8 * 32_000_000,
        # While 16 rows of 512 + 1,600 cells are validated: an adapter of rank 16 on all products
        # with gradient and moments, keys and values of 4 heads of 128 in 28 layers and last rows,
        # a refresh of whole rows, logits of blocks of 32; graphs of 4,096 tokens with such logits,
        # 48 results and descriptions of 16 MiB, a column for padding.
        "tracerl_dream": 2 * DREAM
        + 16 * 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
        + 16 * 2113 * (28 * 2 * 4 * 128 * 2 + 3584 * 2)
        + (16 * 2112 + 4096) * 3 * (3584 + 18944) * 2
        + 3 * 16 * 32 * 152064 * 2
        + 2 * 640_000_000
        + 48 * (48 * 16 * 2112 + 16 * 2**20),
        # The same of 8 rows of 784 + 1,024 cells, without an adapter.
        "benchmark_dream_dllm_rl": 2 * DREAM
        + 8 * 1809 * (28 * 2 * 4 * 128 * 2 + 3584 * 2)
        + (8 * 1808 + 4096) * 3 * (3584 + 18944) * 2
        + 3 * 8 * 32 * 152064 * 2
        + 2 * 640_000_000
        + 48 * (48 * 8 * 1808 + 16 * 2**20),
        # A step on one row of a prompt, a clean and a noisy copy (784 + 2,000 + 2,003 tokens): as
        # TABOM's, with adapters on all products and the norms of query and key.
        "sft_sdar": 2 * SDAR_4B
        + 16 * 36 * 16 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
        + 4787 * 36 * 2560 * 2
        + 4787 * 2 * (2 * 2560 + (2 * 2560 + 9728) + 4 * 4096 + 3 * 9728 + 4096 + 1024)
        + 4787 * (2 * 2560 + 6 * 9728)
        + 4787 * 3 * 2560 * 2
        + 2000 * 2560 * 8
        + 8 * 32_000_000,
    }
    sharded = {"tracerl_sdar": SHARDS}
    found = {
        name: shipped("--config", f"exp/{name}", *sharded.get(name, [])).most(8) / GIB
        for name in by_hand
    }
    assert found == pytest.approx({name: size / GIB for name, size in by_hand.items()}, rel=1e-4)
    assert [round(size, 1) for size in found.values()] == [58.6, 16.5, 24.0, 19.6, 10.8]


NUMBERS = {"one": 1, "two": 2, "four": 4, "eight": 8}
SHARDS = ["--config", "trainer/fsdp"]
HEADERS = [
    ([*case, *SHARDS * ("trainer/fsdp" in found[3])], *found.groups()[:2])
    for case in experiments()
    for file in [word for flag, word in pairwise(case) if flag == "--config"][-1:]
    if (found := re.search(r"(\w+) GPUs? with (\d+) GB(.*)", find(file).read_text()))
]
"""What is run, and the number and size of the GPUs that its head, or its last overlay's, names."""


@pytest.mark.slow  # every recipe is planned
def test_headers_name_gpus_that_hold_what_is_planned() -> None:
    assert len(HEADERS) >= 60
    too_large = {}
    for case, number, size in HEADERS:
        plan = shipped(*case)
        count = NUMBERS.get(number) or int(number)
        if plan.most(count) > int(size) * 10**9:
            too_large[" ".join(case)] = plan.most(count) / 1e9
    assert not too_large


def test_what_cannot_fit_is_refused_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice its weights are there, four times are needed; split over four processes it fits."""
    size = 4 * PARAMETERS
    options = config(trainable=True)
    monkeypatch.setattr("lit_dlm.commands.memory.LARGE", 0)
    monkeypatch.setattr("lit_dlm.commands.memory.device_bytes", lambda _: 2 * size)
    with pytest.raises(ValueError, match=r"random weights: .* try a smaller .* or split weights"):
        check_run(options)
    assert check_run(config(trainable=True, trainer={**SHARDED, "devices": 4})) is not None
    monkeypatch.setattr("lit_dlm.commands.memory.device_bytes", lambda _: None)
    assert "at most at a time" in (check_run(options) or "")


@pytest.mark.parametrize(("command", "trains"), [("fit", True), ("validate", False)])
def test_a_run_that_cannot_fit_ends_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, trains: bool
) -> None:
    """A trillion parameters: building them would take hours. Validation takes their bytes alone."""
    sizes = {"hidden_size": 33024, "intermediate_size": 131072, "num_layers": 64}
    options = [f"--model.backbone.architecture.{name}={value}" for name, value in sizes.items()]
    with pytest.raises(SystemExit):
        main([command, "--config", "exp/pretrain_tiny", f"--run_dir={tmp_path}", *options])
    told = capsys.readouterr().err
    assert "GiB are needed on each of 1 device(s)" in told
    assert ("gradients" in told) == ("optimiser states" in told) == trains
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_plan_of_a_release(capsys, caplog) -> None:
    """8.19 B parameters in float32: 30.51 GiB, a sixty-fourth of which is 0.48."""
    main(["plan", "--config", "exp/tracerl_sdar", "--config", "trainer/fsdp"])
    told = capsys.readouterr().out
    assert not caplog.messages  # such as Lightning's about the seed
    assert "8,190,735,360 parameters, 8,190,735,360 trained" in told
    (weights,) = [line for line in told.splitlines() if line.startswith("weights")]
    assert weights.split()[1:] == ["30.51", "15.26", "7.63", "3.81", "1.91", "0.95", "0.48"]
