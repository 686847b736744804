"""A task of letters, and runs that record its decodes."""

from lit_dlm import DecodeModule
from lit_dlm.decoding import ConfidencePolicy, Decoder, RandomPolicy
from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample, Task
from lit_dlm.tracelock.generate import TraceModule
from tests.fakes import TableBackbone, logits_for

LENGTH = 4


class Letters(Task):
    """Prompts of one letter; the third completion is graded wrong."""

    name = "letters"

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def examples(self) -> list[PromptExample]:
        return [
            PromptExample(uid=f"letters/test/{n}", task=self.name, text=chr(97 + n))
            for n in range(self.count)
        ]

    def reference_completion(self, example):
        return example.text

    def extract(self, example, completion):
        return completion

    def grade(self, example, completion):
        wrong = example.uid.endswith("/2")
        return Verdict(status="wrong" if wrong else "right", score=0.5 if wrong else None)


class ByteTokenizer:
    chat_template = None

    def apply_chat_template(self, turns, *, add_generation_prompt: bool, return_dict: bool):
        return [7, *(10 + byte for byte in turns[0]["content"].encode())]

    def decode(self, ids, *, skip_special_tokens: bool):
        return " ".join(str(int(i)) for i in ids)

    def get_vocab(self):
        return {"a": 1}


class Table(TableBackbone):
    """Surest of the first cell of a response, then of the next; raises at one of its forwards."""

    def __init__(self, fail_at: int | None = None) -> None:
        ids, probs = [5, 6, 40, 41, 42, 43], [0.5, 0.5, 0.9, 0.8, 0.7, 0.6]
        super().__init__(logits_for(ids, probs, vocab_size=300))
        self.fail_at = fail_at

    def denoise(self, ids, **options):
        if self.forwards == self.fail_at:
            raise RuntimeError("the machine broke")
        return super().denoise(ids, **options)


def both_decoders() -> dict[str, Decoder]:
    return {
        "confidence": Decoder(policy=ConfidencePolicy()),
        "random": Decoder(policy=RandomPolicy()),
    }


def trace_module(*, seed: int = 0, capture: bool = True, fail_at: int | None = None):
    kind = TraceModule if capture else DecodeModule
    module = kind(Table(fail_at), tokenizer="bytes", decoders=both_decoders(), seed=seed)
    module.__dict__["tokenizer"] = ByteTokenizer()
    return module
