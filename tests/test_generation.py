import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import lit_dlm
from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, load_tokenizer
from lit_dlm.decoding import (
    BlockCache,
    BlockWindow,
    ConfidencePolicy,
    Decoder,
    DecodeResult,
    DecodeState,
    DualCache,
    FixedQuota,
    FullWindow,
    NoQuota,
    Observer,
    StepRecord,
    TemplateLayout,
    ThresholdPolicy,
)
from lit_dlm.decoding.regions import Region
from tests.backbones.conftest import tiny_architecture

PROMPTS = ["What is 2 + 3?", "Tom has 4 apples and buys 9 more. How many apples has he now?", "Hi"]
FAST = {"policy": ConfidencePolicy(), "quota": FixedQuota(4)}


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def test_texts_messages_and_ids_give_the_same_responses_in_any_batch(backbone, tokenizer):
    decoder = Decoder(window=BlockWindow(8), cache=DualCache(), **FAST)
    settings = {"decode": decoder, "response_length": 16}
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    ids = [
        list(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False))
        for m in messages
    ]
    texts = lit_dlm.generate(backbone, PROMPTS, tokenizer=tokenizer, **settings)
    alone = lit_dlm.generate(backbone, messages, tokenizer=tokenizer, batch_size=1, **settings)
    plain = lit_dlm.generate(backbone, ids, batch_size=2, **settings)
    assert texts.ids == alone.ids == plain.ids
    assert texts.num_steps == alone.num_steps == plain.num_steps
    assert texts.texts == alone.texts == [tokenizer.decode(i) for i in texts.ids]
    assert plain.texts == []
    assert texts.trajectories == []
    assert texts.decoder["cache"]["name"] == "DualCache"


def test_a_model_in_training_decodes_without_dropout_and_goes_on_with_it(tokenizer):
    backbone = load_backbone("tiny", lora=LoRASettings(rank=2, dropout=0.9))
    for name, parameter in backbone.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter, 0.1)
    settings = {"decode": Decoder(**FAST), "tokenizer": tokenizer, "response_length": 16}
    found = lit_dlm.generate(backbone, PROMPTS, **settings)
    assert all(part.training for part in backbone.modules())
    assert found.ids == lit_dlm.generate(backbone.eval(), PROMPTS, **settings).ids
    assert not backbone.training


def test_trajectories_are_recorded_on_demand_in_the_order_of_the_prompts(backbone, tokenizer):
    settings = {"decode": Decoder(**FAST), "response_length": 8, "trajectories": True}
    done = lit_dlm.generate(backbone, PROMPTS, tokenizer=tokenizer, **settings)
    for number, record in enumerate(done.trajectories):
        assert record.uid == str(number)
        assert record.num_steps == done.num_steps[number] == 2
        assert record.tokens.tolist()[: len(done.ids[number])] == done.ids[number]
        prompt = tokenizer.decode(record.prompt_ids)
        assert PROMPTS[number] in prompt


class StopAt(Observer):
    requires = frozenset()

    def __init__(self, step: int) -> None:
        self.last, self.step = step, 0

    def on_start(self, state: DecodeState) -> None:
        pass

    def on_end(self, result: DecodeResult) -> None:
        pass

    def on_step(self, record: StepRecord) -> bool:
        self.step += 1
        return self.step >= self.last


@pytest.mark.parametrize(("last", "count"), [(1, 0), (8, 1), (9, 2)])
def test_an_observer_that_ends_a_decode_drops_what_has_not_ended(last: int, count: int) -> None:
    """Alone, the first takes 9 steps, the second 8."""
    asked = ["Tom has 34 pens, finds 7, loses 5. How many pens?", "Ann has 3 cups. How many cups?"]
    decoder = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota())
    done = lit_dlm.generate(
        "tiny", asked, decode=decoder, response_length=24, observers=[StopAt(last)],
        trajectories=True,
    )  # fmt: skip
    assert done.num_steps == [9, 8][2 - count :]
    assert [record.uid for record in done.trajectories] == ["0", "1"][2 - count :]


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_a_block_model_writes_block_after_block_without_being_told(origin):
    """From the sequence, blocks of 4 hold a prompt's tail and 3 or 2 cells of its response."""
    torch.manual_seed(3)
    blocks = {"attention": "block", "block_size": 4, "block_origin": origin}
    model = HFBackbone(architecture=tiny_architecture(decoder="qwen3", **blocks)).eval()
    settings = {"response_length": 10, "trajectories": True}
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    done = lit_dlm.generate(model, prompts, **settings)
    for record in done.trajectories:
        first = record.num_prompt if origin == "sequence" else 0
        blocks = [(first + cell) // 4 for cell in range(10)]
        order = sorted(range(10), key=record.commit_step.tolist().__getitem__)
        assert [blocks[cell] for cell in order] == blocks
    assert done.decoder["window"]["block_length"] == 4
    assert done.decoder["window"].get("origin", "response") == origin
    cached = Decoder(policy=ConfidencePolicy(), cache=BlockCache())
    assert lit_dlm.generate(model, prompts, decode=cached, **settings).ids == done.ids
    full = Decoder(policy=ConfidencePolicy(), window=FullWindow())
    with pytest.raises(ValueError, match=r"window: .* block after block.*got FullWindow"):
        lit_dlm.generate(model, [[5, 6]], decode=full)
    with pytest.raises(ValueError, match="got FullWindow"):
        full.check(model)  # before anything is decoded


def test_a_name_brings_its_own_tokenizer():
    done = lit_dlm.generate("tiny", ["What is 2 + 3?"], decode=Decoder(**FAST), response_length=8)
    assert len(done.texts) == 1
    rest, answer = Region(name="R", length=2), Region(name="A", marker="####")
    marked = Decoder(**FAST, layout=TemplateLayout([rest, answer]))
    done = lit_dlm.generate("tiny", ["What is 2 + 3?"], decode=marked, response_length=8)
    assert "####" in done.texts[0]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        *(([], "prompts"), ("text", "prompts"), ([[4, 5], []], "prompts")),
        (["text"], "tokenizer: prompt 0 is text"),
    ],
)
def test_bad_prompts_are_refused(backbone, prompts, message):
    with pytest.raises(ValueError, match=message):
        lit_dlm.generate(backbone, prompts)


def test_the_package_imports_without_torch():
    code = "import sys, lit_dlm; assert 'torch' not in sys.modules; lit_dlm.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        lit_dlm.generat  # noqa: B018 - the access is the test


def test_the_package_lists_its_names():
    assert {"generate", "Generations", "__version__"} <= set(dir(lit_dlm))


@pytest.mark.parametrize(("count", "told"), [(11, True), (10, False)])
def test_many_prompts_are_counted_on_a_terminal(backbone, tokenizer, monkeypatch, count, told):
    screen = io.StringIO()
    for is_terminal in (True, False):
        console = Console(file=screen, width=80, force_terminal=is_terminal)
        monkeypatch.setattr("lit_dlm.generation.get_console", lambda one=console: one)
        settings = {"decode": Decoder(**FAST), "tokenizer": tokenizer, "response_length": 16}
        lit_dlm.generate(backbone, ["Hi"] * count, batch_size=4, **settings)
        assert ("11 prompts" in screen.getvalue()) == (told and is_terminal)
        screen.seek(0)
        screen.truncate()
