"""What other programs read: transformers, peft and the hub of an export, EvalPlus of results."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cli
from lit_dlm.backbones import HFBackbone, LoRASettings, load_backbone, load_tokenizer
from lit_dlm.backbones.base import backbone_facts
from lit_dlm.backbones.export import save_adapter
from lit_dlm.backbones.location import ASSETS
from lit_dlm.backbones.projection import ProjectorConfig
from lit_dlm.decoding import Decoder, NoQuota
from lit_dlm.decoding.description import decoder_from_description
from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import HumanEvalPlus
from lit_dlm.tracelock.network import AcceptanceConfig
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.tracelock.scorer import AcceptanceScorer
from lit_dlm.training.checkpoint import _name_mask
from tests.e2e.runs import SHARED, fails, problems, run
from tests.hub_server import HubServer
from tests.projectors import random_orthogonal
from tests.reports.rows import row
from tests.twins import write_twin

DREAM = "Dream-org/Dream-v0-Instruct-7B"
IDS = torch.tensor([[40, 41, 42, 43, 44, 45]])
MINI = SHARED / "humaneval" / "HumanEvalPlus-Mini.jsonl.gz"
pytestmark = pytest.mark.slow
PLAIN = ("--dtype=float32", "--layout=hf")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A twin of Dream and an adapter for it whose every factor is random."""
    folder = tmp_path_factory.mktemp("models")
    model = write_twin(folder / "dream", DREAM)
    backbone = HFBackbone(str(model), dtype="bfloat16", lora=LoRASettings(rank=2))
    torch.manual_seed(0)
    for name, parameter in backbone.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(backbone, folder / "adapter")
    return str(model), str(folder / "adapter")


def raw(backbone: HFBackbone) -> torch.Tensor:
    """Logits of a model with a right shift as its own decoder gives them: row i speaks of i + 1."""
    return backbone(IDS)[:, 1:]


def test_a_merged_export_is_the_same_model_in_transformers(twin: Any, tmp_path: Path):
    """Merged, in float32 as the adapter runs: only rounding differs; the tokenizer is beside it."""
    model, adapter = twin
    with torch.no_grad():
        run("merge", model, str(tmp_path / "m"), f"--adapter={adapter}", *PLAIN)
        merged = load_backbone(model, adapter=adapter)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="sdpa")
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(theirs(IDS).logits[:, :-1], raw(merged), rtol=0, atol=1e-4)
        assert not torch.equal(raw(merged), raw(load_backbone(model)))
    before, after = load_tokenizer(model), AutoTokenizer.from_pretrained(tmp_path / "m")
    assert after("What is 2 + 3?")["input_ids"] == before("What is 2 + 3?")["input_ids"]
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["mask_token_id"] == merged.spec.mask_id
    assert theirs.generation_config.pad_token_id == merged.spec.pad_id


def test_an_exported_adapter_is_the_same_in_peft(twin: Any, tmp_path: Path, capsys: Any):
    model, adapter = twin
    run("export", model, str(tmp_path / "base"), *PLAIN)
    run("export", model, str(tmp_path / "a"), "--adapter", adapter, "--only_adapter", *PLAIN)
    told = fails(capsys, "merge", model, str(tmp_path / "a"), "--adapter", adapter)
    assert "with other files" in told  # transformers would load both
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    theirs = PeftModel.from_pretrained(base, tmp_path / "a")
    with torch.no_grad():
        ours = raw(load_backbone(model, adapter=adapter))
        torch.testing.assert_close(theirs(IDS).logits[:, :-1], ours, rtol=0, atol=1e-5)
    card = (tmp_path / "a" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"


def test_an_export_without_options_has_the_layout_that_came(twin: Any, tmp_path: Path):
    """The same keys, values and words of the configuration, and it decodes."""
    model, _ = twin
    run("export", model, str(tmp_path / "again"))
    folders = (Path(model), tmp_path / "again")
    before, after = (json.loads((one / "config.json").read_text()) for one in folders)
    assert after["model_type"] == before["model_type"] == "Dream"
    assert after["dtype"] == before["torch_dtype"] == "bfloat16"
    assert torch.equal(load_backbone(model)(IDS), load_backbone(tmp_path / "again")(IDS))


def test_the_card_has_the_numbers_of_this_model_only(capsys: Any, tmp_path: Path):
    few = f"--data.init_args.tasks={problems(2)}"
    hasty = "--model.decoders.entropy.quota={class_path: BudgetQuota, init_args: {steps: 4}}"
    run("predict", "--config=exp/evaluate_tiny", few, hasty, f"--run_dir={tmp_path}")
    run("export", "tiny", str(tmp_path / "out"), f"--results={tmp_path}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "summary.md").read_text() in card
    data = yaml.safe_load(card.split("---")[1])
    found = data["model-index"][0]["results"][0]
    accuracy = json.loads((tmp_path / "summary.json").read_text())[0]["accuracy"]
    assert (accuracy, found["metrics"][0]["value"]) == (0.5, 50.0)
    message = fails(capsys, "export", "tiny-planning", str(tmp_path / "x"), f"--results={tmp_path}")
    assert "has another weights_sha256" in message
    assert not (tmp_path / "x").exists()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A hub on this machine in place of the real one."""
    server = HubServer()
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.close()


@pytest.mark.parametrize("place", ["", "me/dream--"])
def test_exports_name_the_familys_own_code_where_it_lies(
    hub: HubServer, place: str, tmp_path: Path
):
    """That of a folder goes along, that of the hub stays there; also by way of another layout."""
    model, code = write_twin(tmp_path / "dream", DREAM), b"class DreamConfig: ..."
    (model / "configuration_dream.py").write_bytes(code)
    hub.files["me/dream"] = {path.name: path.read_bytes() for path in model.iterdir()}
    run("export", "me/dream" if place else str(model), str(tmp_path / "hf"), "--layout=hf")
    run("export", str(tmp_path / "hf"), str(tmp_path / "again"))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": f"{place}configuration_dream.DreamConfig",
        "AutoModel": f"{place}modeling_dream.DreamModel",
    }
    found = [path.read_bytes() for path in (tmp_path / "again").glob("*.py")]
    assert found == ([] if place else [code])


def test_push_takes_what_export_wrote_and_an_adapter_loads_from_the_hub(
    twin: Any, hub: HubServer, capsys: Any, tmp_path: Path
):
    model, adapter = twin
    folder = tmp_path / "a"
    assert "'lit-dlm export'" in fails(capsys, "push", str(tmp_path), "me/adapter")
    told = fails(capsys, "push", adapter, "me/adapter")  # as fit leaves it
    assert f"'lit-dlm export MODEL FOLDER --adapter {adapter} --only_adapter' wrote" in told
    assert not hub.files
    run("export", model, str(folder), "--adapter", adapter, "--only_adapter")
    run("push", str(folder), "me/adapter")
    assert hub.private == {"me/adapter": True}
    assert hub.files["me/adapter"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:  # offline
        patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        told = fails(capsys, "push", str(folder), "me/adapter")
        assert "me/adapter: the hub does not take the folder" in told
    with torch.no_grad():
        found = load_backbone(model, adapter="me/adapter")(IDS)
        assert torch.equal(found, load_backbone(model, adapter=adapter)(IDS))


def test_an_adapter_on_a_pinned_model_names_it_without_the_revision(
    twin: Any, hub: HubServer, tmp_path: Path
):
    model, adapter = twin  # one of a folder whose name is the model's
    hub.files["me/dream"] = {path.name: path.read_bytes() for path in Path(model).iterdir()}
    folder = tmp_path / "a"
    run("export", "me/dream@v1", str(folder), "--adapter", adapter, "--only_adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    card = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert config["base_model_name_or_path"] == card["base_model"] == "me/dream"


def test_a_policy_is_shared_with_a_card_that_says_how_to_use_it(
    hub: HubServer, capsys: Any, tmp_path: Path
):
    backbone = load_backbone("tiny")
    config = ProjectorConfig(hidden_size=96, num_snapshots=3, hidden_rank=4, delta_rank=2)
    scorer = AcceptanceScorer(
        random_orthogonal(config, seed=0),
        head=AcceptanceConfig(width=8, num_layers=1, num_heads=1, ffn_width=8),
        backbone=backbone_facts(backbone.spec, backbone),
        training={"tasks": ["word_problems"], "global_step": 7},
    )
    scorer.save(tmp_path / "policy")
    run("push", str(tmp_path / "policy"), "me/policy", "--public")
    assert hub.private == {"me/policy": False}
    card = hub.files["me/policy"]["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "lit-dlm"
    assert "hidden_size 96" in card
    assert "tasks ['word_problems'], global_step 7" in card

    (tmp_path / "policy.yaml").write_text(card.split("```yaml\n")[1].split("```")[0])
    shown = ("--config", str(tmp_path / "policy.yaml"), "--response_length=8")
    cli.main(["generate", "Hi", *shown])
    told = capsys.readouterr().out
    cli.main(["generate", "Hi", *shown, f"--policy.init_args.path={tmp_path / 'policy'}"])
    assert capsys.readouterr().out == told
    policy = TraceLockPolicy("me/policy")
    assert policy.describe()["weights"] == scorer.digest()
    decoder = Decoder(policy=policy, quota=NoQuota())
    assert decoder_from_description(decoder.describe(), policy_folders=["me/policy"])


def write_results(run_dir: Path, task: HumanEvalPlus) -> dict[str, bool]:
    """Graded right solutions, those of the problem before, ones that lost a line, and no code.

    Returns which are right.
    """
    folder = ResultFolder(run_dir / "results")
    folder.claim(task.name, "mine", {"any": 1})
    examples, rows = list(task.examples()), []
    texts = [task.reference_completion(example) for example in examples]
    for number, (example, text) in enumerate(zip(examples, texts, strict=True)):
        body = text.rstrip("`\n").rpartition("\n")[0]
        kinds = [text, texts[number - 1], f"{body}\n```", "I do not know."]
        verdict = task.grade(example, kinds[(0, 2, 0, 1, 2, 3)[number % 6]])
        graded = {"correct": verdict.is_correct, "verdict": verdict.status}
        named = {"task": task.name, "method": "mine", "answer": verdict.answer}
        rows.append(row(example.uid, **named, **graded))
    folder.append(rows)
    return {one.uid: one.correct for one in rows}


def test_evalplus_agrees_on_what_is_exported(tmp_path: Path):
    """Its own check of twelve problems of HumanEval+ Mini, with answers right and wrong."""
    evaluate = pytest.importorskip("evalplus.evaluate", reason="extra 'code' is not installed")
    if not MINI.is_file():
        pytest.skip("the data of HumanEval+ are absent")
    task = HumanEvalPlus(str(MINI), limit=12, allow_code_execution=True)
    ours = write_results(tmp_path, task)
    assert 0 < sum(ours.values()) < 12
    run("evalplus", str(tmp_path))
    lines = (tmp_path / "evalplus" / "humaneval+-mine.jsonl").read_text().splitlines()
    samples = {line["task_id"]: line["solution"] for line in map(json.loads, lines)}
    theirs = {}
    for example in task.examples():
        right = example.reference["solution"]
        problem = {**example.reference, "prompt": "", "canonical_solution": right}
        expected: dict[str, Any] = {}
        for part in ("base", "plus"):
            given = (right, problem[f"{part}_input"], problem["entry_point"])
            done = evaluate.trusted_exec(*given, record_time=True)
            expected[part], expected[f"{part}_time"] = done
        done = evaluate.check_correctness(
            "humaneval", 0, problem, samples[problem["task_id"]], expected, fast_check=True
        )
        theirs[example.uid] = all(done[part][0] == "pass" for part in ("base", "plus"))
    assert theirs == ours


def test_only_results_of_its_problems_are_samples(capsys: Any, tmp_path: Path):
    assert "expected results of humaneval" in fails(capsys, "evalplus", str(tmp_path))


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_files_of_somebody_else_are_not_overwritten(capsys: Any, tmp_path: Path, name: str):
    (tmp_path / name).write_text("# Mine")
    assert "--force" in fails(capsys, "export", "tiny", str(tmp_path))
    assert (tmp_path / name).read_text() == "# Mine"
    run("export", "tiny", str(tmp_path), "--force")
    assert "Written by lit-dlm" in (tmp_path / "README.md").read_text()
    run("export", "tiny", str(tmp_path))  # is our own now


SECRET = b'{"key of the user": 1}'


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, outside of every model folder."""
    path = tmp_path / "id_rsa"
    path.write_bytes(SECRET)
    return path


def folder_with(path: Path, **links: Path) -> Path:
    """A copy of the embedded model, with links in it."""
    shutil.copytree(ASSETS / "tiny", path, ignore=shutil.ignore_patterns("*policy", *links))
    for name, place in links.items():
        (path / name).symlink_to(place)
    return path


@pytest.mark.parametrize("name", ["vocab.json", "codebook.png", "chat_template.jinja"])
def test_a_link_out_of_a_models_folder_is_not_exported(
    capsys: Any, name: str, victim: Path, tmp_path: Path
):
    model = folder_with(tmp_path / "model", **{name: victim})
    told = fails(capsys, "export", str(model), str(tmp_path / "out"))
    assert f"{model / name}: expected a regular file of this folder, got {victim}" in told
    assert all(SECRET not in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_a_link_to_code_out_of_a_release_is_not_exported(capsys: Any, victim: Path, tmp_path: Path):
    model = write_twin(tmp_path / "dream", DREAM)
    (model / "modeling_dream.py").symlink_to(victim)
    assert "modeling_dream.py: expected" in fails(capsys, "export", str(model), str(tmp_path / "x"))
    assert not (tmp_path / "x" / "modeling_dream.py").exists()


def test_no_export_writes_or_reads_through_a_link(twin: Any, victim: Path, tmp_path: Path):
    model, adapter = twin
    out = folder_with(
        tmp_path / "out",
        **dict.fromkeys(["tokenizer.json", "config.json", "generation_config.json"], victim),
    )
    run("export", "tiny", str(out), "--force")
    assert load_tokenizer(str(out)).get_vocab() == load_tokenizer("tiny").get_vocab()
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (tmp_path / "adapter" / name).symlink_to(victim)
    options = ["--adapter", adapter, "--only_adapter", "--force"]
    run("export", model, str(tmp_path / "adapter"), *options)
    assert not any(
        path.is_symlink() for path in (*out.iterdir(), *(tmp_path / "adapter").iterdir())
    )
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_a_new_mask_is_not_named_through_a_link(name: str, victim: Path, tmp_path: Path):
    """What is left in the folder of an export, as nothing of the tokenizer replaces it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name}: expected a regular file of this folder"):
        _name_mask(tmp_path / "out", "<|mask|>", 7)
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize("blobs", ["models--me--tiny/blobs", "blobs/5f"])
def test_links_of_the_hubs_cache_to_its_blobs_are_exported(blobs: str, tmp_path: Path):
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    for path in (ASSETS / "tiny").glob("*.*"):
        shutil.copyfile(path, tmp_path / blobs / f"of-{path.name}")
        (snapshot / path.name).symlink_to(tmp_path / blobs / f"of-{path.name}")
    run("export", str(snapshot), str(tmp_path / "out"))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (ASSETS / "tiny" / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("name", ["notes.txt", "more"])
def test_push_uploads_no_file_from_elsewhere(
    hub: HubServer, capsys: Any, name: str, victim: Path, tmp_path: Path
):
    model = folder_with(tmp_path / "model")
    (model / name).symlink_to(victim if name == "notes.txt" else victim.parent)
    assert f"{name}: expected a regular file of" in fails(capsys, "push", str(model), "me/model")
    assert not hub.files


def test_the_dtype_of_a_models_files_is_one_of_weights(capsys: Any, tmp_path: Path):
    model = folder_with(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "save"}))
    told = fails(capsys, "export", str(model), str(tmp_path / "out"))
    assert f"{model / 'config.json'}: dtype: expected 'float32', 'bfloat16'" in told
