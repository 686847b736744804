"""A GPU without enough memory, through the command line: one line, and nothing is lost."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import adam

from lit_dlm.backbones import HFBackbone
from tests.e2e.runs import QUIET, RECORD, fails, problems, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]

SFT = ["fit", "--config=exp/sft_gt_tiny", "--trainer.max_steps=6"]
SFT += ["--data.batch_size=2", "--data.rows_per_update=6"]
RL = f"""fit --config=exp/tracerl_tiny --trainer.max_epochs=2 --data.batch_size=24
    --data.prompts_per_step=3 --data.responses_per_prompt=4 --data.filters=null
    --data.val_tasks={problems(2)}""".split()
PREDICT = [*RECORD, f"--data.tasks={problems(4, 'train')}"]
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB."
IN_TRAINING = "in training; lower data.batch_size"
GOES_ON = "; --ckpt_path last goes on from optimiser step {saved}"
RECOMPUTE = " in a new run, or set gradient_checkpointing of the backbone and go on"
IN_SFT = f"{IN_TRAINING}{RECOMPUTE}{GOES_ON}"


def without_memory(patch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[], bool]):
    """A function that asks for too much once a condition holds."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if when():
            raise torch.OutOfMemoryError(f"{ERROR} GPU 0 has a total capacity of 4.00 GiB of which")
        return real(*args, **options)

    patch.setattr(owner, name, call)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Last checkpoints of undisturbed runs, by configuration."""
    found = {}
    for command in (SFT, RL):
        folder = tmp_path_factory.mktemp("whole")
        run(*command, *QUIET, f"--run_dir={folder}")
        found[command[1]] = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("command", "owner", "name", "before", "advice"),
    [
        # The second of three batches of the fifth update, of which four are saved
        (SFT, HFBackbone, "score_tokens", 13, IN_SFT.format(saved=4)),
        # Weights are between two steps
        (SFT, adam, "_single_tensor_adam", 4, IN_SFT.format(saved=0)),
        (RL, HFBackbone, "denoise", 0, f"in decoding; lower data.rollout_batch_size{GOES_ON}"),
        (RL, HFBackbone, "score_with_hidden", 1, f"{IN_TRAINING}{GOES_ON}"),
        (PREDICT, HFBackbone, "denoise", 3, "in decoding; lower data.batch_size"),
    ],
)
def test_a_run_without_memory_names_the_option_and_goes_on(
    command: list[str],
    owner: Any,
    name: str,
    before: int,
    advice: str,
    whole: dict[str, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last, calls = tmp_path / "cut" / "checkpoints" / "last.ckpt", []

    def is_due() -> bool:
        if command is RL and not last.exists():  # the first RL step is whole
            return False
        if name.startswith("score_") and not torch.is_grad_enabled():
            return False
        calls.append(None)
        return len(calls) == before + 1

    with pytest.MonkeyPatch.context() as patch:
        without_memory(patch, owner, name, is_due)
        told = fails(capsys, *command, *QUIET, f"--run_dir={tmp_path / 'cut'}")
    saved = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
    assert told == f"lit-dlm: error: {ERROR}; {advice.format(saved=saved)}"
    if command is PREDICT:
        return
    run(*command, *QUIET, f"--run_dir={tmp_path / 'cut'}", "--ckpt_path=last")
    cut, expected = torch.load(last, weights_only=True), whole[command[1]]
    assert cut["global_step"] == expected["global_step"]
    for key, value in expected["state_dict"].items():
        assert cut["state_dict"][key].equal(value), key
