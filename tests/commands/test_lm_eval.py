"""lm-eval through our engine: the same completions and grades as our own benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.decoding import Decoder, FixedQuota, NoQuota, RandomPolicy, Sampler, ThresholdPolicy
from lit_dlm.generation import generate
from lit_dlm.likelihood import log_likelihood_bound
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.toy import WordProblems
from tests.e2e.runs import fails, results, run, write_config, write_jsonl
from tests.serve.servers import serving
from tests.twins import write_twin

TASK = r"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 32}}
filter_list:
- name: number
  filter:
  - {{function: regex, regex_pattern: '####\s*(-?\d+)'}}
  - {{function: take_first}}
metric_list:
- {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
- {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
OURS = """
model: {{init_args: {{decoders: {{mine: decode/threshold_09_dual.yaml}}}}}}
data:
  init_args:
    tasks: [{{class_path: WordProblems, init_args: {{num_examples: {count}}}}}]
    methods: [mine]
"""
COUNT = 24


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return pytest.importorskip("lm_eval", reason="lm-eval (extra 'eval') is not installed")


@pytest.fixture(scope="module")
def tiny():
    return load_backbone("tiny"), load_tokenizer("tiny")


def word_problems(folder: Path, count: int) -> str:
    """Writes an lm-eval task of word problems; returns its folder."""
    folder.mkdir()
    rows = [
        {"uid": e.uid, "text": e.text, "answer": str(e.reference["answer"])}
        for e in WordProblems(num_examples=count).examples()
    ]
    file = write_jsonl(folder / "test.jsonl", rows)
    write_config(folder / "words.yaml", TASK.format(name="words", file=file))
    return str(folder)


def samples(run_dir: Path, task: str) -> list[dict[str, Any]]:
    lines = (run_dir / f"samples_{task}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_same_items_get_the_same_completions_and_grades(lm_eval: Any, tmp_path: Path):
    """Of every item the text, the grade and in all the forwards, with a threshold and a cache."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    mine = write_config(tmp_path / "mine.yaml", OURS.format(count=COUNT))
    run("predict", "--config", "exp/evaluate_tiny", "--config", mine, "--run_dir", str(ours))
    evaluate = ["eval", "--tasks=[words]", f"--run_dir={theirs}"]
    evaluate += ["--config", "decode/threshold_09_dual"]
    run(*evaluate, "--include_path", word_problems(tmp_path / "task", COUNT))
    rows = {row.uid: row for row in results(ours)["word_problems", "mine"]}
    found = samples(theirs, "words")
    assert {s["doc"]["uid"]: s["resps"][0][0] for s in found} == {
        uid: row.completion for uid, row in rows.items()
    }
    assert {s["doc"]["uid"]: bool(s["exact_match"]) for s in found} == {
        uid: row.correct for uid, row in rows.items()
    }
    summary = json.loads((theirs / "results.json").read_text())
    num_right = sum(row.correct for row in rows.values())
    assert 0 < num_right < COUNT
    assert summary["results"]["words"]["exact_match,number"] == num_right / COUNT
    assert summary["num_steps"]["mean"] == sum(row.nfe for row in rows.values()) / COUNT
    # Once more: every answer comes from the file.
    answers = (theirs / "answers.jsonl").read_bytes()
    (theirs / "answers.jsonl").write_bytes(answers + b'["torn')
    run(*evaluate, "--include_path", str(tmp_path / "task"))
    assert (theirs / "answers.jsonl").read_bytes() == answers
    assert samples(theirs, "words") == found


@pytest.mark.slow
def test_a_server_is_asked_by_lm_eval_and_gives_what_eval_gives(lm_eval: Any, tmp_path: Path):
    """Of every item the text; several are asked for at once."""
    folder, decoder = word_problems(tmp_path / "task", COUNT), ("--config", "decode/threshold_09")
    run("eval", "--tasks=[words]", f"--run_dir={tmp_path}", "--include_path", folder, *decoder)
    expected = {one["doc"]["uid"]: one["resps"] for one in samples(tmp_path, "words")}
    with serving(tmp_path / "server", "tiny", *decoder) as server:
        found = lm_eval.simple_evaluate(
            model="local-chat-completions",
            model_args={
                "model": "tiny",
                "base_url": f"{server.url}/v1/chat/completions",
                "num_concurrent": 8,
            },
            tasks=["words"],
            task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False),
            apply_chat_template=True,
            fewshot_as_multiturn=True,
        )
    assert {one["doc"]["uid"]: one["resps"] for one in found["samples"]["words"]} == expected
    summary = json.loads((tmp_path / "results.json").read_text())
    number = "exact_match,number"
    assert found["results"]["words"][number] == summary["results"]["words"][number]


def requests_of(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0)  # type: ignore[arg-type]
        for one in arguments
    ]


def test_texts_are_cut_and_their_seeds_are_their_own(lm_eval: Any, tiny: Any):
    """The order and the batch change nothing; of equal requests each is drawn anew."""
    from lit_dlm.commands.lm_eval import DiffusionLM

    decoder = Decoder(policy=RandomPolicy(), quota=FixedQuota(4), sampler=Sampler(temperature=1.0))
    forth = DiffusionLM(*tiny, decoder, batch_size=1)
    back = DiffusionLM(*tiny, decoder, batch_size=3)
    problems = [e.text for e in WordProblems(num_examples=3).examples()]
    prompts = [forth.apply_chat_template([{"role": "user", "content": p}]) for p in problems]

    def texts(model: Any, order: list[int], **options: Any) -> list[str]:
        asked = [(prompts[n], {"max_gen_toks": 32, **options}) for n in order]
        return model.generate_until(requests_of("generate_until", *asked), disable_tqdm=True)

    found = texts(forth, [0, 1, 2, 0])
    assert found[0] != found[3]
    assert all(found)
    turned = texts(back, [1, 2, 0, 0])
    assert turned == [found[1], found[2], found[0], found[3]]
    assert forth.num_steps == [8] * 4
    cut = texts(back, [0, 1, 2], until=["=", "###"])
    assert cut == [text.partition("=")[0].partition("###")[0] for text in found[:3]] != found[:3]


def test_choices_are_scored_by_the_bound(lm_eval: Any, tiny: Any, tmp_path: Path):
    """acc is that of the arg-max over bounds which are computed here."""
    backbone, tokenizer = tiny
    rows = []
    for example in WordProblems(num_examples=4).examples():
        answer = int(example.reference["answer"])
        choices = [f"#### {number}" for number in (answer + 3, answer, answer + 11)]
        rows.append({"text": example.text, "choices": choices, "label": 1})
    (tmp_path / "task").mkdir()
    file = write_jsonl(tmp_path / "task" / "test.jsonl", rows)
    write_config(tmp_path / "task" / "c.yaml", CHOICES.format(name="choices", file=file))
    run(
        *("eval", "--tasks=[choices]", f"--include_path={tmp_path / 'task'}"),
        *(f"--run_dir={tmp_path / 'run'}", "--num_draws=16", "--check_greedy=false"),
    )
    for sample in samples(tmp_path / "run", "choices"):
        context, target = sample["arguments"][1]
        ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        bounds = [float(resp[0][0]) for resp in sample["resps"]]
        assert sample["acc"] == float(bounds.index(max(bounds)) == 1)
        whole = tokenizer(context + target, add_special_tokens=False)["input_ids"]
        seed = sample_seed(0, json.dumps(ids))
        assert bounds[1] == log_likelihood_bound(
            backbone, ids, whole[len(ids) :], num_draws=16, seed=seed, batch_size=16
        )


def test_greedy_is_what_the_decoder_writes_and_texts_are_scored_in_windows(lm_eval: Any, tiny: Any):
    from lit_dlm.commands.lm_eval import DiffusionLM

    backbone, tokenizer = tiny
    decoder = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota())
    model = DiffusionLM(backbone, tokenizer, decoder, num_draws=2)
    question = "Tom has 34 pens, finds 7, loses 5. How many pens?"
    prompt = model.apply_chat_template([{"role": "user", "content": question}])
    ids = model.tok_encode(prompt)
    written = generate(backbone, [ids], decode=decoder, response_length=12).ids[0]
    pairs = [(("", ""), ids, written), (("", ""), ids, [written[0] ^ 1, *written[1:]])]
    assert [greedy for _, greedy in model._loglikelihood_tokens(pairs)] == [True, False]
    text = "Tom has 34 pens"
    whole = model.loglikelihood_rolling(requests_of("loglikelihood_rolling", (text,)))
    scored = model._loglikelihood_tokens(
        [(("", ""), [model.prefix_token_id], model.tok_encode(text))]
    )
    assert whole == [scored[0][0]]
    assert whole[0] < 0.0
    # 515 tokens: a window of the 512 positions has 511 behind the prefix, the next one the other 4.
    assert backbone.max_positions == 512
    ids = model.tok_encode("7" * 515)
    (whole,) = model.loglikelihood_rolling(requests_of("loglikelihood_rolling", ("7" * 515,)))
    windows = [([model.prefix_token_id], ids[:511]), (ids[3:511], ids[511:])]
    seeds = [sample_seed(0, json.dumps(context)) for context, _ in windows]
    assert whole == sum(
        log_likelihood_bound(backbone, *window, num_draws=2, seed=seed, batch_size=16)
        for window, seed in zip(windows, seeds, strict=True)
    )


def test_bad_requests_are_one_line(lm_eval: Any, capsys: Any, tmp_path: Path, monkeypatch: Any):
    assert "tasks: lm-eval knows no 'gsm9k'" in fails(capsys, "eval", "--tasks=[gsm9k]")
    task = word_problems(tmp_path / "task", 1)
    asked = ["eval", "--tasks=[words]", f"--include_path={task}", f"--run_dir={tmp_path}"]
    with (tmp_path / "task" / "words.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    assert "runs model-written code, which lm-eval does unprotected" in fails(capsys, *asked)
    (tmp_path / "answers.jsonl").write_text("{}\n")
    assert "answers.jsonl, line 1: expected a name" in fails(capsys, *asked)


def test_longer_requests_are_refused_before_any_is_answered(
    lm_eval: Any, tiny: Any, tmp_path: Path
):
    """500 tokens and 13 more, of 512 positions."""
    from lit_dlm.commands.lm_eval import DiffusionLM

    model, texts = DiffusionLM(*tiny, answers=tmp_path / "answers.jsonl"), ("7", "7" * 500)
    asked = requests_of("generate_until", *((text, {"max_gen_toks": 13}) for text in texts))
    asked[1].task_name, asked[1].doc_id = "words", 3
    wanted = "expected at most the 512 positions of the model, got 513 tokens"
    with pytest.raises(ValueError, match=f"^words, document 3: {wanted}"):
        model.generate_until(asked)
    scored = requests_of("loglikelihood", *((text, "8" * 13) for text in texts))
    with pytest.raises(ValueError, match=rf"^log-likelihood of \.\.\.'7{{27}}8{{13}}': {wanted}"):
        model.loglikelihood(scored)
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dream", "llada"])
def test_recipes_of_tabom_run_on_twins(lm_eval: Any, tmp_path: Path, monkeypatch: Any, family: str):
    """One item of two of lm-eval's own tasks with a worked example, at the recipe's settings."""
    monkeypatch.chdir(tmp_path)
    release = {"dream": "Dream-org/Dream-v0-Instruct-7B", "llada": "GSAI-ML/LLaDA-8B-Instruct"}[
        family
    ]
    write_twin(tmp_path / release, release, hidden_size=16)
    question = {"question": "2 + 2?", "options": ["3", "4"], "answer": "B", "category": "biology"}
    for split in ("test", "validation"):
        folder = tmp_path / "TIGER-Lab" / "MMLU-Pro"
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / f"{split}.jsonl", [{**question, "cot_content": "A: It is (B)."}])
    wrong = {f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)}
    (tmp_path / "Idavidrein" / "gpqa").mkdir(parents=True)
    rows = [{"Question": f"{n} + 2?", "Correct Answer": str(n + 2), **wrong} for n in (4, 5)]
    write_jsonl(tmp_path / "Idavidrein" / "gpqa" / "train.jsonl", rows)
    (tmp_path / "Idavidrein" / "gpqa" / "README.md").write_text(
        "---\nconfigs:\n- {config_name: gpqa_main, data_files: train.jsonl}\n---\n"
    )
    run(
        *("eval", f"--config=eval/tabom_{family}", "--num_fewshot=1", "--limit=1"),
        *("--tasks=[mmlu_pro_biology,gpqa_main_generative_n_shot]", "--response_length=8"),
    )
    summary = json.loads((tmp_path / "runs" / "eval" / "results.json").read_text())
    assert set(summary["results"]) == {"mmlu_pro_biology", "gpqa_main_generative_n_shot"}
    assert summary["settings"]["decoder"]["policy"]["name"] == "EntropyPolicy"
    assert summary["num_steps"] == {"texts": 2, "mean": 8.0}
    (sample,) = samples(tmp_path / "runs" / "eval", "mmlu_pro_biology")
    assert "It is (B)." in sample["arguments"][0][0]
