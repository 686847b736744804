"""Mistakes in a configuration that show before torch and Lightning are imported.

The parser has the last word; it takes seconds to start. Here files and options are put together and
compared with the source of the classes that they name (:mod:`lit_dlm.source_index`).
"""

from __future__ import annotations

import ast
import ctypes.util
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_dlm import source_index
from lit_dlm.config_files import FOLDER, load, merge, nearest, with_files
from lit_dlm.source_index import ClassSource

_RUN_KEYS = {"seed_everything", "trainer", "model", "data", "run_dir", "tf32", "ckpt_path"}
_LOOP_KEYS = {"return_predictions", "verbose", "print_config"}
_INPUTS = {"path", "shards", "more_shards", "adapter", "ckpt_path", "tokenizer", "projector"}
"""Options that name what must exist already."""
_FILES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".ckpt")
_COUNTS = {
    *("batch_size", "val_batch_size", "rollout_batch_size", "response_length", "max_prompt_length"),
    *("responses_per_prompt", "prompts_per_step", "limit"),
}
"""Options of our classes that are counts from 1."""
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
STRATEGIES = {
    *("auto", "single_device", "fsdp", "fsdp_cpu_offload", "single_tpu", "single_xla", "xla"),
    *("xla_debug", "deepspeed", "deepspeed_stage_1", "deepspeed_stage_3_offload_nvme"),
    *(f"deepspeed_stage_{stage}{rest}" for stage in (2, 3) for rest in ("", "_offload")),
    *(f"ddp{how}{rest}" for how in ("", "_spawn", "_fork", "_notebook") for rest in (
        "", "_find_unused_parameters_true", "_find_unused_parameters_false")),
}  # fmt: skip
"""What Lightning knows by name."""
_EXTRAS = {
    "TensorBoardLogger": ("tensorboard", "log"),
    "WandbLogger": ("wandb", "log"),
    "MBPPPlus": ("evalplus", "code"),
    "load_in_4bit": ("bitsandbytes", "quantized"),
    "AdamW8bit": ("bitsandbytes", "quantized"),
    "eval": ("lm_eval", "eval"),
}
"""Package and extra that a class, an option or a command needs."""
_WANTED = {"predict": ("predict_step", "predict_dataloader")}
_TRAINS = ("training_step", "train_dataloader")
_MOST_BYTES = 20_000_000
_PLAIN = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "Path": (str,)}


def check(command: str, arguments: Sequence[str]) -> None:
    """Looks for mistakes in the files and options of a command.

    Args:
        command: one that :func:`check_run` knows, or one that takes a decoder.
        arguments: what follows it.

    Raises:
        ValueError: one was found; says where, what was expected and what came.
    """
    if any(a.startswith(("--help", "-h", "--print")) or ".help" in a for a in arguments):
        return
    if command in ("fit", "validate", "test", "predict"):
        check_run(command, arguments)
    else:
        _check_extra(command, command)
        check_decoder(arguments)


def check_run(command: str, arguments: Sequence[str]) -> None:
    """Does so for ``fit``, ``validate``, ``test`` or ``predict``."""
    document = _document(arguments)
    known = _RUN_KEYS | _LOOP_KEYS
    for key in document:
        if key not in known:
            raise ValueError(f"unknown key '{key}'{nearest(key, _RUN_KEYS)}")
    document = _resolved(merge(load(str(FOLDER / "base.yaml")), document))
    seed = document.get("seed_everything")
    if not isinstance(seed, int):
        raise ValueError(f"seed_everything: expected a whole number, true or false, got {seed!r}")
    _check_trainer(document.get("trainer") or {})
    for key in ("model", "data"):
        if not document.get(key):
            raise ValueError(
                f"{key}: expected a class, got none; give --config FILE ('lit-dlm recipes' lists "
                "the shipped ones)"
            )
        _check_class(key, document[key], None)
    method, loader = _WANTED.get(command, _TRAINS)
    for key, name in (("model", method), ("data", loader)):
        _require(key, document[key], name, command)
    _check_inputs("", {k: document[k] for k in ("data", "model", "ckpt_path") if k in document})
    for at, name, settings in _classes("data", document["data"]):
        _check_rows(at, name, settings)
    _check_checkpoint(document.get("ckpt_path"))
    model, data = (document[key].get("init_args") or {} for key in ("model", "data"))
    methods = data.get("methods")
    for kind in ("decoders", "sweep"):
        model[kind] = {
            name: decoder
            for name, decoder in (model.get(kind) or {}).items()
            if methods is None or any(f"{one}_".startswith(f"{name}_") for one in methods)
        }
    _check_backbone("model.backbone", model.get("backbone"), _classes("model", document["model"]))
    folder = Path(document["run_dir"])
    is_first = all(os.environ.get(rank, "0") == "0" for rank in _RANKS)
    if is_first and (folder / f".{command}.lock").exists():
        with import_module("lit_dlm.run_lock").locked(folder, command):
            pass


def check_decoder(arguments: Sequence[str]) -> None:
    """Does so for the decoder and the model of ``generate`` and its like."""
    decoder = source_index.short_name("Decoder")
    assert decoder is not None
    parameters = decoder.parameters() or {}
    document = _resolved(_document(arguments))
    for key, value in document.items():
        if key in parameters:
            _check_value(key, value, parameters[key].annotation, decoder.module)
    _check_backbone("backbone", document.get("backbone", "tiny"), _classes("", document))


def _document(arguments: Sequence[str]) -> dict[str, Any]:
    """Files and options as one configuration; options that do not fit into it are left out."""
    document: dict[str, Any] = {}
    given = with_files(arguments)
    while given:
        option, equals, text = given.pop(0).partition("=")
        if not option.startswith("--"):
            continue
        if not equals:
            text = given.pop(0) if given and not given[0].startswith("--") else "true"
        if option == "--config":
            document = merge(document, json.loads(text))
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        _put(document, option.removeprefix("--").split("."), value)
    return document


def _put(place: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if key != "init_args" and "class_path" in place:
            place = place.setdefault("init_args", {})
        inner = place.get(key)
        if isinstance(inner, list):  # as the parser does: options are those of the last element
            inner = inner[-1] if inner else None
        if isinstance(inner, str):
            inner = place[key] = {"class_path": inner}
        if inner is None:
            inner = place[key] = {}
        if not isinstance(inner, dict):
            return
        place = inner
    last = keys[-1]
    if "class_path" in place and last not in ("class_path", "init_args"):
        place = place.setdefault("init_args", {})
    if last.endswith("+"):
        more = value if isinstance(value, list) else [value]
        place[last[:-1]] = [*(place.get(last[:-1]) or []), *more]
    elif isinstance(place.get(last), dict) and isinstance(value, str):
        place[last] = {"class_path": value, "init_args": _kept(place[last], value)}
    else:
        place[last] = merge(place.get(last), value)


def _kept(old: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Settings that a class given by its name alone takes over from the one before it."""
    found = source_index.named(name)
    parameters = found.parameters() if found else None
    settings = old.get("init_args") or {}
    return {k: v for k, v in settings.items() if parameters is None or k in parameters}


def _resolved(document: dict[str, Any]) -> dict[str, Any]:
    """References that files and options alone can tell; the others stay."""
    document.setdefault("run_dir", "runs/default")
    try:
        whole = OmegaConf.create(document)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{error.full_key}: expected references like ${{run_dir}}, got "
            f"{str(error).splitlines()[0]}"
        ) from None

    def plain(value: Any, at: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v, OmegaConf.create({})) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v, None) for v in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            probe = OmegaConf.create({"_": value})
            probe._set_parent(whole)
            return probe["_"]
        except OmegaConfBaseException:
            return value

    return {key: plain(value, None) for key, value in document.items()}


def _check_trainer(options: Any) -> None:
    if not isinstance(options, Mapping):
        raise ValueError(f"trainer: expected a mapping of the trainer's options, got {options!r}")
    trainer = source_index.class_in("lightning.pytorch.trainer.trainer", "Trainer")
    assert trainer is not None
    parameters = trainer.parameters() or {}
    for key, value in options.items():
        name = key.removesuffix("+")
        if name not in parameters:
            raise ValueError(f"unknown key 'trainer.{name}'{nearest(name, parameters)}")
        _check_value(f"trainer.{name}", value, parameters[name].annotation, trainer.module)
    for name in ("callbacks", "callbacks+", "logger"):
        given = options.get(name)
        for number, one in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(one, str | Mapping):
                _check_class(f"trainer.{name.removesuffix('+')}[{number}]", one, None)
    _check_devices(options)


def _check_devices(options: Mapping[str, Any]) -> None:
    """Refuses unknown strategies, no devices, and GPUs that no driver shows."""
    strategy = options.get("strategy", "auto")
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        raise ValueError(
            f"trainer.strategy: Lightning has no '{strategy}'{nearest(strategy, STRATEGIES)}"
        )
    devices: Any = options.get("devices")
    if _is_number(devices) and devices < 1 and devices != -1:
        raise ValueError(f"trainer.devices: expected at least 1, auto or -1 for all, got {devices}")
    if options.get("accelerator") not in ("gpu", "cuda") or sys.platform == "darwin":
        return
    drivers = ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")
    if ctypes.util.find_library("cuda") is None and not any(map(os.path.exists, drivers)):
        raise ValueError(
            "trainer.accelerator: expected cpu or auto, as this machine has no GPU driver, got "
            f"'{options['accelerator']}'"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = visible.split(",") if visible else list(Path("/proc/driver/nvidia/gpus").glob("*"))
    if found and _is_number(devices) and devices > len(found):
        advice = ""
        if len(found) == 1 and "SLURM_PROCID" in os.environ:
            advice = (
                " (a task of SLURM sees one of them: use --gpus-per-node in place of "
                "--gpus-per-task, or --gpu-bind=none beside it)"
            )
        raise ValueError(
            f"trainer.devices: expected at most {len(found)} GPUs, got {devices}{advice}"
        )


def _check_class(at: str, given: Any, expected: ClassSource | None) -> None:
    """Checks a class that is named, and its settings."""
    spec = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
        takes_settings = expected is not None and (expected.is_dataclass or not _is_plug(expected))
        if isinstance(spec, Mapping) and expected is not None and takes_settings:
            _check_settings(at, expected, spec)
            return
        raise ValueError(
            f"{at}: expected a class, as its name or a mapping with class_path and init_args, "
            f"got {given!r}"
        )
    for key in spec:
        if key not in ("class_path", "init_args", "dict_kwargs"):
            name = spec["class_path"].rsplit(".", 1)[-1]
            raise ValueError(f"{at}: expected {key} below init_args of {name}, not beside it")
    name = spec["class_path"]
    _check_extra(at, name.rsplit(".", 1)[-1])
    found = _find_class(at, name)
    if found is None:
        return
    if expected is not None:
        _check_kind(at, found, expected)
    settings = spec.get("init_args") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"{at}.init_args: expected a mapping, got {settings!r}")
    _check_settings(at, found, settings)


def _find_class(at: str, name: str) -> ClassSource | None:
    """The class of that name; ``None`` if only importing it can tell."""
    module, _, attribute = name.rpartition(".")
    if not module:
        found = source_index.short_name(name)
        if found is None:
            if name.endswith((".yaml", ".yml")) or "/" in name:
                raise ValueError(f"{at}: there is no configuration {name!r}")
            raise ValueError(
                f"{at}: unknown class '{name}'{nearest(name, source_index.own_classes())}"
            )
        return found
    if name.endswith((".yaml", ".yml")):
        raise ValueError(f"{at}: there is no configuration file {name!r}")
    names = source_index.names_in(module)
    if names is None:
        if source_index.module_file(module) is None and not _could_exist(module):
            raise ValueError(
                f"{at}: there is no module '{module}' in the working folder or the installed "
                f"packages, in which to find '{attribute}'"
            )
        return None
    found = source_index.class_in(module, attribute)
    if attribute not in names and not {"*", "__getattr__"} & names.keys():
        own = source_index.short_name(attribute)
        if own is not None and own.module.startswith("lit_dlm"):
            raise ValueError(f"{at}: '{name}' is no longer there; write class_path: {attribute}")
        raise ValueError(f"{at}: {module} has no class '{attribute}'{nearest(attribute, names)}")
    return found


def _could_exist(module: str) -> bool:
    """Whether a module may be there all the same: loaded already, compiled or generated."""
    top = module.partition(".")[0]
    file = source_index.module_file(top)
    return (
        module in sys.modules
        or top in sys.builtin_module_names
        or (file is not None and "." in module)
    )


def _check_settings(at: str, owner: ClassSource, settings: Mapping[str, Any]) -> None:
    parameters = owner.parameters()
    if parameters is None:
        return
    for key, value in settings.items():
        name = str(key).removesuffix("+")
        if name not in parameters:
            raise ValueError(
                f"{at}: {owner.name} has no option '{name}'{nearest(name, parameters)}"
            )
        is_count = name in _COUNTS and owner.module.startswith("lit_dlm")
        if is_count and _is_number(value) and value < 1:
            raise ValueError(f"{at}.{name}: expected at least 1, got {value}")
        if value:
            _check_extra(f"{at}.{name}", name)
        one = parameters[name]
        _check_value(f"{at}.{name}", value, one.annotation, one.module)
    left = [name for name, one in parameters.items() if one.is_required and name not in settings]
    if left and owner.module.startswith("lit_dlm"):
        raise ValueError(f"{at}: {owner.name} needs the option '{left[0]}'")


def _check_value(at: str, value: Any, annotation: ast.expr | None, module: str) -> None:
    """Checks a value against an annotation, as far as that is understood."""
    if value is None or (isinstance(value, str) and "${" in value):
        return
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        _check_extra(at, value["class_path"].rpartition(".")[2])
        _find_class(at, value["class_path"])
    members = _members(annotation, module)
    if members is None:
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            _check_class(at, value, None)
        return
    if isinstance(value, str) and ("plain", "str") in members:
        return
    faults = []
    for member in members:
        try:
            _check_member(at, value, member, module)
        except _NotThisOne as error:
            faults.append(str(error))
        else:
            return
    assert annotation is not None
    wanted = " or ".join(dict.fromkeys(faults))
    raise ValueError(f"{at}: expected {wanted}, got {value!r}")


class _NotThisOne(Exception):  # noqa: N818  (never leaves this module)
    """A member of a union that a value does not fit; says what would."""


def _check_member(at: str, value: Any, member: Any, module: str) -> None:
    kind, detail = member
    if kind == "plain":
        _check_plain(value, detail)
    elif kind == "literal":
        if value not in detail:
            raise _NotThisOne(f"one of {', '.join(map(str, detail))}")
    elif kind == "list":
        if not isinstance(value, list):
            raise _NotThisOne("a list")
        for number, one in enumerate(value):
            _check_value(f"{at}[{number}]", one, detail, module)
    elif kind == "mapping":
        if not isinstance(value, Mapping):
            raise _NotThisOne("a mapping")
        for name, one in value.items():
            _check_value(f"{at}.{name}", one, detail, module)
    elif isinstance(value, Mapping | str):
        _check_class(at, value, detail)
    else:
        raise _NotThisOne(f"a {detail.name}")


def _check_plain(value: Any, kind: str) -> None:
    fits = isinstance(value, _PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits and isinstance(value, str) and kind != "str":
        try:  # texts of numbers are taken for numbers, by the parser too
            parsed = float(value) if kind == "float" else yaml.safe_load(value)
            fits = not isinstance(parsed, str) and isinstance(parsed, _PLAIN[kind])
        except (ValueError, yaml.YAMLError):
            fits = False
    if not fits and kind == "int" and isinstance(value, float) and value.is_integer():
        fits = True
    if not fits:
        names = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        raise _NotThisOne(names.get(kind, "a text"))


def _members(annotation: ast.expr | None, module: str) -> list[tuple[str, Any]] | None:
    """The types that an annotation allows; ``None`` if one of them is not understood."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return []
        if isinstance(annotation.value, str):
            return _members(ast.parse(annotation.value, mode="eval").body, module)
        return None
    if isinstance(annotation, ast.BinOp):
        return _all(annotation.left, annotation.right, module=module)
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        match ast.unparse(annotation.value):
            case "Union":
                return _all(*parts, module=module)
            case "Optional":
                return _all(inner, module=module)
            case "Literal":
                return [("literal", [ast.literal_eval(part) for part in parts])]
            case "list" | "Sequence":
                return [("list", inner)]
            case "dict" | "Mapping" if len(parts) == 2:
                return [("mapping", parts[1])]
        return None
    if not isinstance(annotation, ast.Name):
        return None
    if annotation.id in _PLAIN:
        return [("plain", annotation.id)]
    if annotation.id == "Tensor":  # which no configuration can hold
        return []
    found = source_index.statement(module, annotation.id)
    if found is None:
        return None
    where, one = found
    if isinstance(one, ast.Assign):
        return _members(one.value, where)
    if isinstance(one, ast.ClassDef) and where.startswith("lit_dlm"):
        return [("class", ClassSource(one.name, where, one))]
    return None


def _all(*parts: ast.expr, module: str) -> list[tuple[str, Any]] | None:
    found: list[tuple[str, Any]] = []
    for part in parts:
        members = _members(part, module)
        if members is None:
            return None
        found += members
    return found


def _is_plug(one: ClassSource) -> bool:
    return any(base is not None and base.name == "Plug" for base in one.lineage())


def _check_kind(at: str, found: ClassSource, expected: ClassSource) -> None:
    """A class must derive from the expected one, or have its methods where that is enough."""
    lineage = found.lineage()
    if None in lineage or any(one is not None and one.name == expected.name for one in lineage):
        return
    methods = found.methods() or set()
    if not _is_plug(expected):
        return  # a protocol, or an alias of something else
    for name in sorted(expected.abstract_methods() - methods):
        raise ValueError(
            f"{at}: {found.name} has no method '{name}', which {expected.name} asks for"
        )


def _require(at: str, given: Any, method: str, command: str) -> None:
    """Refuses a model or data of the other kind of command."""
    found = _find_class(at, given if isinstance(given, str) else given["class_path"])
    methods = found.methods() if found else None
    if methods is None or method in methods:
        return
    assert found is not None
    other = "predict" if method in _TRAINS else "fit"
    wanted = {
        "training_step": "a model that trains", "train_dataloader": "data to train on",
        "predict_step": "a model that decodes", "predict_dataloader": "prompts to decode",
    }[method]  # fmt: skip
    raise ValueError(
        f"{at}: expected {wanted}, as {command} needs, got {found.name}; this configuration is for "
        f"'lit-dlm {other}'"
    )


def _check_inputs(at: str, value: Any, key: str = "") -> None:
    """Refuses local files and folders that are not there."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in ("decoders", "sweep"):  # read only where their methods are run
                continue
            skipped = name in ("init_args", "class_path")
            _check_inputs(at if skipped else f"{at}.{name}".lstrip("."), inner, str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_inputs(f"{at}[{number}]", inner, key)
    elif key in _INPUTS and isinstance(value, str) and "${" not in value and _looks_local(value):
        path = Path(value).expanduser()
        if not path.exists():
            raise ValueError(f"{at}: there is no file or folder '{value}'")
        if path.is_file() and not path.stat().st_size:
            raise ValueError(f"{at}: '{value}' is empty")


def _classes(at: str, value: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every class in a value, with its place and settings."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _classes(f"{at}[{number}]", inner)
    elif isinstance(value, Mapping):
        settings = value
        if isinstance(value.get("class_path"), str):
            settings = value.get("init_args") or {}
            yield at, value["class_path"], settings
        for name, inner in settings.items():
            yield from _classes(f"{at}.{name}".lstrip("."), inner)


def _check_extra(at: str, name: str) -> None:
    package, extra = _EXTRAS.get(name, ("sys", ""))
    if find_spec(package) is None:
        raise ValueError(
            f"{at}: expected {package}, which is not installed; pip install 'lit-dlm[{extra}]'"
        )


def _check_checkpoint(given: Any) -> None:
    """Refuses a damaged checkpoint file, as far as that takes no time; ``last`` has one before."""
    path = Path(str(given))
    if given is None or path.stem == "last" or not path.is_file():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip() if path.stat().st_size < _MOST_BYTES else None
        problem = f"checksum of {record}" if record else ""
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        problem = str(error)
    if problem:
        raise ValueError(
            f"ckpt_path: {path}: the checkpoint is damaged ({problem}); expected another one"
        )


def _check_backbone(
    at: str, given: Any, classes: Iterator[tuple[str, str, Mapping[str, Any]]]
) -> None:
    """Refuses a backbone that is nowhere, and adapters, policies and projectors of another one."""
    options = given.get("init_args") or {} if isinstance(given, Mapping) else {"path": given}
    if lora := options.get("lora"):
        try:
            import_module("lit_dlm.backbones.lora_settings").LoRASettings(**lora)
        except ValueError as error:
            raise ValueError(f"{at}.{error}") from None
    path, is_made = options.get("path"), options.get("architecture") or options.get("from_ar")
    if not isinstance(path, str) or "${" in path or is_made:
        return
    learned = [
        (f"{place}.{key}", facts)
        for place, name, settings in classes
        for key, facts in _trained_for(name, settings)
    ]
    assets = Path(__file__).parent / "assets"
    if not learned and (_looks_local(path) or Path(path).exists() or (assets / path).exists()):
        return
    base = import_module("lit_dlm.backbones.base")
    try:
        found = import_module("lit_dlm.backbones.resolution").resolve(
            path, spec_overrides=options.get("spec_overrides")
        )
    except ValueError as error:
        raise ValueError(f"{at}.{error}") from None
    for place, trained_for in learned:
        base.check_facts(place, trained_for, base.backbone_facts(found.spec, found.architecture))


def _check_rows(at: str, name: str, settings: Mapping[str, Any]) -> None:
    """Reads a local file of a task or of answered prompts, if that takes no time."""
    path = settings.get("path")
    if settings.get("num_shots"):  # from the hub, perhaps
        return
    if not isinstance(path, str) or any("${" in v for v in settings.values() if isinstance(v, str)):
        return
    place = Path(path).expanduser()
    files = list(place.iterdir()) if place.is_dir() else [place]
    if sum(file.stat().st_size for file in files if file.is_file()) > _MOST_BYTES:
        return
    found = _find_class(at, name)
    if found is None or not place.exists():
        return
    try:
        if found.name == "ResponsesFile":
            split = settings.get("split") or "train"
            for row in import_module("lit_dlm.tasks.sources").read_rows(
                path, split=split, required=()
            ):
                import_module("lit_dlm.tasks.conversations").conversation(row)
        elif found.module.startswith("lit_dlm.tasks."):
            plain = {k: v for k, v in settings.items() if not isinstance(v, Mapping | list)}
            getattr(import_module(found.module), found.name)(**plain)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None


def _trained_for(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options of a class that name folders of what was trained for one backbone, and for which."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # told where it is read
        if name.endswith("TraceLockPolicy"):
            file = Path(settings["path"]).expanduser() / "config.json"
            yield "path", json.loads(file.read_text())["backbone"]
        key = "projector" if "projector" in settings else "projector_dir"
        file = Path(settings[key]).expanduser() / "projector.json"
        yield key, {"hidden_size": json.loads(file.read_text())["config"]["hidden_size"]}


def _looks_local(name: str) -> bool:
    if "://" in name:
        return False
    return name.endswith(_FILES) or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
