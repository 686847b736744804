"""TraceLock's policy with windows, budgets and lengths other than those it was trained with.

The policies are the distilled ones of the policy bench, trained on word problems of 32 cells that
are all in view; nothing is retrained. They decode a fresh list with ``eval/transfer``
at 32 and at 64 cells.

    python experiments/policy_transfer.py --out runs/policy_bench  # makes what is missing
    python experiments/policy_transfer.py  # prints the table of the published results
"""

from __future__ import annotations

from pathlib import Path

from chain import Decodes, call, keep_decodes, parser, points, problems, read_decodes, table
from policy_bench import distil, run_of

LENGTHS = (32, 64)


def main() -> None:
    """Makes what is missing, then prints the table."""
    options = parser(__doc__, 0, 1, 2).parse_args()
    kept = (options.out or Path("docs/results/elsewhere")) / "policy_transfer.parquet"
    if options.out:
        runs = []
        for seed in options.train_seeds:
            run = run_of(options, "words", seed)
            distil(options, "words", seed, run)
            for length in LENGTHS:
                folder = run / f"transfer-{length}"
                call(
                    folder / "done",
                    *("predict", "--config", "exp/evaluate_tiny"),
                    *("--config", "eval/transfer", "--run_dir", run),
                    *("--trainer.callbacks.init_args.run_dir", folder),
                    *("--data.response_length", length),
                    *("--data.tasks", problems("WordProblems", "test", 1000, seed=37)),
                )
                runs.append((f"{length} cells", seed, folder / "results"))
        keep_decodes(kept, runs)
    print(markdown(read_decodes(kept)))


def markdown(decodes: Decodes) -> str:
    """Returns accuracy (per cent) @ forwards by setting and length."""
    settings: dict[tuple[str, int], list[str]] = {}
    for (_, _, method), (forwards, right) in sorted(decodes.items()):
        name, _, value = method.rpartition("_")
        cell = f"{points(right, '')} @ {forwards.mean():.1f}"
        settings.setdefault((name, int(value)), []).append(cell)
    lines = [["", *(f"{length} cells" for length in LENGTHS)]]
    lines += [[f"{name} {value}", *cells] for (name, value), cells in sorted(settings.items())]
    return table(lines)


if __name__ == "__main__":
    main()
