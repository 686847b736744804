"""Training with ``--trainer.fast_dev_run true``: a batch by each method, and nothing is left."""

from pathlib import Path

import pytest

from lit_dlm.backbones.location import locate
from tests.e2e.runs import QUIET, problems, run, write_jsonl

pytestmark = pytest.mark.slow

FEW = problems(4, "train")
RANKS = ("--model.hidden_rank=8", "--model.delta_rank=4")
RECORDED = ("--data.batch_size=2", "--data.val_fraction=0.5")
ANSWERS = (*RECORDED, "--data.sources.init_args.only_correct=false")
RL = (
    *(f"--data.tasks={FEW}", f"--data.val_tasks={FEW}", "--data.prompts_per_step=2"),
    *("--data.responses_per_prompt=2", "--data.filters=null"),
)
PAIRS = "--data.sources=[{class_path: PreferencesFile, init_args: {path: pairs.jsonl}}]"
POLICY = f"--model.policy={locate('tiny') / 'outcome_policy'}"
ON_RECORDS = {
    "tracelock_tiny": (*RECORDED, "--data.only_correct=false"),
    "projector_dream": ("--config=method/projector_tiny", *RECORDED, *RANKS),
    "tabom_tiny": ANSWERS,
    "dparallel_tiny": ANSWERS,
}
ANEW = {
    "sft_gt_tiny": (),
    "d2f_tiny": (),
    "dpo_tiny": (PAIRS,),
    "pretrain_tiny": ("--model.compile=false",),
    "tracerl_tiny": RL,
    "tracelock_outcome_tiny": (*RL, POLICY),
}


def trial(name: str, folder: Path, *flags: str) -> None:
    run(
        *("fit", f"--config=exp/{name}", f"--run_dir={folder}", "--trainer.fast_dev_run=true"),
        *(*flags, "--trainer.enable_progress_bar=false"),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four decodes with features."""
    folder = tmp_path_factory.mktemp("recorded")
    decoders = "--model.decoders={entropy: {policy: EntropyPolicy}}"
    few = (f"--data.tasks={FEW}", "--model.projector_prompts=4", *RANKS, decoders)
    run("predict", "--config=exp/generate_tiny", f"--run_dir={folder}", *few, *QUIET)
    return folder


@pytest.mark.parametrize("name", ON_RECORDS)
def test_a_trial_leaves_a_folder_as_it_was(name: str, recorded: Path) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (recorded, *recorded.rglob("*"))}

    before = files()
    trial(name, recorded, *ON_RECORDS[name])
    assert files() == before


@pytest.mark.parametrize("name", ANEW)
def test_a_trial_makes_no_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "2+3", "chosen": "5", "rejected": "6"}] * 4)
    trial(name, tmp_path / "run", *ANEW[name])
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
