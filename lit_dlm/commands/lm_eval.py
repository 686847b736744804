"""A model class for lm-eval, which runs its tasks with our decoders. Needs the extra ``eval``."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from lit_dlm.backbones import HFBackbone
from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.decoding import ConfidencePolicy, Decoder
from lit_dlm.decoding.api import cut_at, length_buckets
from lit_dlm.generation import generate
from lit_dlm.likelihood import log_likelihood_bound
from lit_dlm.reports.results import drop_torn_line
from lit_dlm.system.options import refuse
from lit_dlm.tensors.sampling import sample_seed

logger = logging.getLogger(__name__)


@register_model("lit-dlm")
@dataclass(eq=False, repr=False)
class DiffusionLM(TemplateLM):
    """A masked diffusion model that decodes with our engine and scores with a Monte-Carlo bound.

    A text is decoded with a seed that follows from the request alone, so neither its place among
    the requests nor ``batch_size`` changes it. The decoder says how tokens are drawn: of a task's
    generation settings, only ``until`` and the length are used.

    Args:
        backbone: the model, in evaluation mode.
        tokenizer: that of the backbone.
        decoder: by default one token per step by confidence.
        response_length: cells to fill; by default the task's ``max_gen_toks`` (256 without one).
        batch_size: prompts decoded together, and masked copies scored together.
        seed: base seed.
        num_draws: masked copies per log-likelihood, in pairs if ``antithetic``.
        antithetic: see :func:`~.likelihood.log_likelihood_bound`.
        check_greedy: whether to check for each log-likelihood if decoding the target's cells writes
            the target: one more decode per request, for tasks on exact matches only, such as
            LAMBADA. Without it the answer is always no.
        answers: a file that receives every answer as it comes; those in it are not computed again.
    """

    backbone: HFBackbone
    tokenizer: PreTrainedTokenizerBase = field()  # required, unlike the base's ``None``
    decoder: Decoder = field(default_factory=lambda: Decoder(policy=ConfidencePolicy()))
    _: KW_ONLY
    response_length: int | None = None
    batch_size: int = 16
    seed: int = 0
    num_draws: int = 128
    antithetic: bool = True
    check_greedy: bool = True
    answers: Path | None = None

    def __post_init__(self) -> None:
        super().__init__()
        # Before settings are described, which have the window that the model's blocks imply.
        self.decoder = self.decoder.on(self.backbone.spec)
        self.num_steps: list[int] = []  # forwards of every text, in the order of the requests
        self._device = self.backbone.device
        self._answers = _read_answers(self.answers)

    def settings(self) -> dict[str, Any]:
        return {
            "backbone": self.backbone.describe(),
            "decoder": self.decoder.describe(),
            "seed": self.seed,
            "num_draws": self.num_draws,
            "antithetic": self.antithetic,
            "check_greedy": self.check_greedy,
        }

    @property
    def eot_token_id(self) -> int:
        return self.backbone.spec.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        start = self.backbone.spec.bos_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        encoded = self.tokenizer(string, add_special_tokens=bool(add_special_tokens))
        return list(encoded["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            apply_chat_template(
                self.tokenizer,
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        requested: list[dict[str, Any]] = []
        cuts: list[list[str]] = []
        drawn: set[str | None] = set()
        for request in requests:
            context, given = request.args
            options = normalize_gen_kwargs(dict(given), 256)
            drawn.update([request.task_name] if options.get("temperature") else [])
            cuts.append(handle_stop_sequences(options.get("until"), eos=None))
            length = self.response_length or int(options["max_gen_toks"])
            requested.append({"prompt": self.tok_encode(context), "length": length})
        if drawn:
            logger.warning("%s: asks for a temperature, which is the sampler's here", drawn)
        self._check_lengths(
            (len(one["prompt"]) + one["length"], f"{request.task_name}, document {request.doc_id}")
            for one, request in zip(requested, requests, strict=True)
        )
        keys = _numbered([json.dumps(one) for one in requested])  # equal ones have their own seeds

        def decode(rows: Sequence[int]) -> list[dict[str, Any]]:
            done = generate(
                self.backbone,
                [requested[row]["prompt"] for row in rows],
                decode=self.decoder,
                tokenizer=self.tokenizer,
                response_length=requested[rows[0]]["length"],
                batch_size=self.batch_size,
                seed=self.seed,
                uids=[keys[row] for row in rows],
            )
            return [
                {"text": text, "num_steps": steps}
                for text, steps in zip(done.texts, done.num_steps, strict=True)
            ]

        # A batch has responses of equal length and prompts of similar length.
        batches = []
        for length in sorted({one["length"] for one in requested}):
            rows = [row for row, one in enumerate(requested) if one["length"] == length]
            sizes = [len(requested[row]["prompt"]) for row in rows]
            batches += [
                [rows[number] for number in part]
                for part in length_buckets(sizes, batch_size=self.batch_size)
            ]
        answers = self._answered(keys, batches, decode, "decoding", is_quiet=disable_tqdm)
        self.num_steps += [answer["num_steps"] for answer in answers]
        return [cut_at(answer["text"], until) for answer, until in zip(answers, cuts, strict=True)]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        *,
        are_windows: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Returns the bound of each target in its context, and whether decoding writes it."""
        self._check_lengths(
            (len(context) + len(target), f"log-likelihood of ...{''.join(texts)[-40:]!r}")
            for texts, context, target in requests
        )
        keys = [json.dumps([context, target]) for _, context, target in requests]

        def score(rows: Sequence[int]) -> list[dict[str, Any]]:
            _, context, target = requests[rows[0]]
            # Targets of equal length after the same context share their draws, so that what is
            # compared differs less by chance.
            seed = sample_seed(self.seed, json.dumps(context))
            bound = log_likelihood_bound(
                self.backbone,
                context,
                target,
                num_draws=self.num_draws,
                antithetic=self.antithetic,
                seed=seed,
                batch_size=self.batch_size,
            )
            is_asked = self.check_greedy and not are_windows
            return [{"bound": bound, "greedy": is_asked and self._writes(context, target)}]

        batches = [[row] for row in range(len(keys))]
        verb = "scoring windows" if are_windows else "scoring"
        answers = self._answered(keys, batches, score, verb, is_quiet=disable_tqdm)
        return [(answer["bound"], answer["greedy"]) for answer in answers]

    def _writes(self, context: list[int], target: list[int]) -> bool:
        done = generate(
            self.backbone,
            [context],
            decode=self.decoder,
            tokenizer=self.tokenizer,
            response_length=len(target),
            seed=self.seed,
        )
        return done.ids[0] == target

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the bound for whole texts, in disjoint windows as long as the model allows."""
        pairs: list[tuple[tuple[str, str], list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = [
                # Every token is scored once: what windows share is context alone.
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.backbone.architecture.max_positions - 1,  # besides the context
                    context_len=1,
                )
            ]
            pairs += [(("", ""), context, target) for context, target in windows]
            counts.append(len(windows))
        bounds = iter(self._loglikelihood_tokens(pairs, disable_tqdm, are_windows=True))
        return [sum(next(bounds)[0] for _ in range(count)) for count in counts]

    def _check_lengths(self, requested: Iterable[tuple[int, str]]) -> None:
        """Refuses requests (tokens, name) if the longest has more tokens than the model allows."""
        length, name = max(requested, default=(0, ""))
        if length > (limit := self.backbone.architecture.max_positions):
            wanted = f"at most the {limit} positions of the model"
            refuse(name, wanted, f"{length} tokens of prompt and response")

    def _answered(
        self,
        keys: Sequence[str],
        batches: Sequence[Sequence[int]],
        answer: Callable[[Sequence[int]], list[dict[str, Any]]],
        verb: str,
        *,
        is_quiet: bool,
    ) -> list[dict[str, Any]]:
        """Returns the answers in the order of the keys; those not in the file are computed."""
        settings = ""
        if self.answers is not None:
            settings = json.dumps(self.settings(), sort_keys=True)
            self.answers.parent.mkdir(parents=True, exist_ok=True)
        # The name covers all that decides an answer, so a file of other settings does no harm.
        names = [f"{sample_seed(0, settings + verb + key):016x}" for key in keys]
        left = [[row for row in rows if names[row] not in self._answers] for rows in batches]
        for rows in track([rows for rows in left if rows], verb, disable=is_quiet):
            for row, result in zip(rows, answer(rows), strict=True):
                self._answers[names[row]] = result
                if self.answers is not None:
                    # Opened for every answer: a kill tears one line, which is dropped later.
                    with self.answers.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([names[row], result], ensure_ascii=False) + "\n")
        return [self._answers[name] for name in names]


def _read_answers(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    # Where a kill has cut the last line, the next answer would be appended to it.
    drop_torn_line(path)
    answers = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            name, answer = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected a name and an answer") from None
        answers[name] = answer
    return answers


def _numbered(keys: Sequence[str]) -> list[str]:
    """Makes keys unique: the second of equal ones gets a number, and so on."""
    # The same request twice, as for pass@k, asks for two draws.
    seen: Counter[str] = Counter()
    named = []
    for key in keys:
        named.append(f"{key}#{seen[key]}" if seen[key] else key)
        seen[key] += 1
    return named
