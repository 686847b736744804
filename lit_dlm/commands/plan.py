"""``lit-dlm plan``: parameters of a configuration, and its memory on 1 to 64 devices."""

from __future__ import annotations

from collections.abc import Sequence

HELP = """usage: lit-dlm plan --config FILE [--config FILE ...] [options]

Prints what a run takes at most: parameters, memory of each of 1 to 64 devices, a checkpoint.
No weights are loaded: of a hub model that is not on this machine only its description is fetched.
Options are those of fit and predict.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the plan of a ``fit`` run with these arguments."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP, end="")  # noqa: T201
        return 0
    # Imported after --help, as torch and Lightning take seconds to import.
    from lit_dlm.commands.run import parsed

    config = parsed(["fit", *arguments])
    from lit_dlm.commands.memory import advice, plan_of

    plan = plan_of(config)
    if plan is None:
        raise ValueError("model.backbone: expected an HFBackbone, of which a plan can be made")
    print("\n".join(filter(None, [plan.table(), advice(config, plan)])))  # noqa: T201
    return 0
