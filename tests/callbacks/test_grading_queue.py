import threading
from types import SimpleNamespace

from lit_dlm.callbacks.decode_writer import GradingQueue
from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample


class Slow:
    """Grades when it is let, and counts."""

    name = "slow"
    runs_code = False
    is_graded = True

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.num_graded = 0

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        self.began.set()
        self.may_end.wait(10)
        self.num_graded += 1
        return Verdict(status="right", answer=completion)


def batch(uid: str) -> SimpleNamespace:
    example = PromptExample(uid=uid, task="slow", text="x")
    return SimpleNamespace(examples=[example], completions=["y"], trajectories=[])


def test_what_a_closed_queue_has_not_graded_is_left_out_in_silence() -> None:
    """The first grade is running when the run breaks off; the second never begins."""
    task = Slow()
    queue = GradingQueue({"slow": task})
    queue.submit(batch("a"))
    queue.submit(batch("b"))
    assert task.began.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    task.may_end.set()
    closing.join()
    assert [decoded.examples[0].uid for decoded, _ in queue.finished()] in ([], ["a"])
    assert task.num_graded == 1


def test_equal_completions_of_a_problem_are_graded_once() -> None:
    task = Slow()
    task.may_end.set()
    queue = GradingQueue({"slow": task})
    for uid in ("a", "a", "b"):
        queue.submit(batch(uid))
    assert len(list(queue.finished(wait=True))) == 3
    queue.close()
    assert task.num_graded == 2
