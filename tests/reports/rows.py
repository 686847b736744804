"""Rows of results."""

from dataclasses import replace

from lit_dlm.reports.results import ResultRow


def row(uid: str = "t/test/0", **changes) -> ResultRow:
    base = ResultRow(
        uid=uid,
        task="t",
        method="m",
        correct=True,
        verdict="right",
        detail="",
        answer="4",
        completion="2+2=4\n#### 4",
        nfe=8,
        policy_forwards=0,
        idle_steps=0,
        stalled_steps=0,
        num_tokens=12,
        response_length=32,
        seconds=0.25,
        status="complete",
        seed=7,
    )
    return replace(base, **changes)
