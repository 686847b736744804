"""``lit-dlm eval``: tasks of lm-eval with our decoders."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lit_dlm.commands.generation import add_decoding_arguments, built
from lit_dlm.config.files import compose
from lit_dlm.config.parser import Parser
from lit_dlm.system.files import write_atomically


@dataclass(kw_only=True)
class EvaluationOptions:
    """Options of the command, besides those of a model and a decoder.

    Args:
        tasks: Such as [ifeval, gsm8k].
        run_dir: Receives the results.
        include_path: Tasks of your own.
        limit: Items per task.
        response_length: Cells to fill; the task's own number by default.
        num_draws: Masked copies per log-likelihood.
        antithetic: Whether to draw in pairs.
        check_greedy: Whether log-likelihoods say if the text would be decoded; multiple choice is
            faster without.
    """

    tasks: list[str]
    run_dir: str = "runs/eval"
    include_path: str | None = None
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveInt | None = None
    response_length: PositiveInt | None = None
    apply_chat_template: bool = True
    num_draws: PositiveInt = 128
    antithetic: bool = True
    check_greedy: bool = True


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = Parser(
        prog="lit-dlm eval",
        description="Evaluates on tasks of lm-eval. The decoder is that of --config, a decode file "
        "such as configs/decode/threshold_09.yaml, and of --policy, --window, --quota, --sampler, "
        "--cache and --settings. Tasks that run model-written code are refused: 'lit-dlm predict' "
        "has them, in a sandbox. A run that was interrupted goes on.",
    )
    parser.add_class_arguments(EvaluationOptions, None, sub_configs=True)
    add_decoding_arguments(parser)
    config = parser.parse_composed(compose(arguments))
    # Read when ``datasets`` is imported; model-written code must run in our sandbox only.
    os.environ.pop("HF_ALLOW_CODE_EVAL", None)
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from lit_dlm.commands.lm_eval import DiffusionLM

    manager = TaskManager(include_path=config.include_path, include_defaults=False)
    if not set(config.tasks) <= set(manager.all_tasks):  # lm-eval's own thousands take seconds
        manager = TaskManager(include_path=config.include_path)
    if unknown := [name for name in config.tasks if name not in manager.all_tasks]:
        raise ValueError(
            f"tasks: lm-eval knows no {', '.join(map(repr, unknown))}; a folder with tasks of your "
            "own is --include_path ('lm_eval ls tasks' lists the others)"
        )
    # After the tasks are known: a model takes minutes to load.
    backbone, tokenizer, decoder = built(parser, config)
    folder = Path(config.run_dir)
    names = ("response_length", "batch_size", "seed", "num_draws", "antithetic", "check_greedy")
    settings = {name: config[name] for name in names}
    model = DiffusionLM(backbone, tokenizer, decoder, **settings, answers=folder / "answers.jsonl")
    try:
        result = lm_eval.simple_evaluate(
            model=model,
            tasks=config.tasks,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,
            task_manager=manager,
        )
    except ValueError as error:
        # lm-eval has no class for this refusal.
        if "unsafe" not in str(error):
            raise
        raise ValueError(
            "tasks: one of them runs model-written code, which lm-eval does unprotected; "
            "'lit-dlm predict' grades such tasks in a sandbox"
        ) from None
    steps = model.num_steps
    summary = {
        "results": result["results"],
        "groups": result.get("groups", {}),
        "n-samples": result["n-samples"],
        "versions": {**result["versions"], "lm_eval": lm_eval.__version__},
        "configs": result["configs"],
        "settings": {
            **model.settings(),
            **{name: config[name] for name in ("response_length", "apply_chat_template", "limit")},
        },
        "num_steps": {"texts": len(steps), "mean": sum(steps) / len(steps) if steps else None},
    }
    for task, samples in result["samples"].items():
        lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
        write_atomically(folder / f"samples_{task}.jsonl", "\n".join(lines) + "\n")
    write_atomically(folder / "results.json", json.dumps(summary, indent=2, default=str) + "\n")
    lines = [make_table(result), *([make_table(result, "groups")] if result.get("groups") else [])]
    lines += [f"{len(steps)} texts, {sum(steps) / len(steps):.2f} forwards each"] if steps else []
    sys.stdout.write("\n".join([*lines, f"Results and samples: {folder}"]) + "\n")
    return 0
