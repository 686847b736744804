"""Rows of results."""

from lit_dlm.reports.results import ResultRow


def row(uid: str = "t/test/0", **changes) -> ResultRow:
    none = dict.fromkeys(("policy_forwards", "idle_steps", "stalled_steps"), 0)
    graded = {"correct": True, "verdict": "right", "detail": "", "answer": "4"}
    decode = {"nfe": 8, "num_tokens": 12, "response_length": 32, "seconds": 0.25, "seed": 7}
    text = {"completion": "2+2=4\n#### 4", "status": "complete"}
    named = {"uid": uid, "task": "t", "method": "m"}
    return ResultRow(**{**named, **none, **graded, **decode, **text, **changes})
