"""Tasks of lm-eval as plain values: prompts, settings of generation, and a scorer of one answer at a time.

lm-eval makes the prompts, finds the answers with its filters and scores them with its metrics; it asks nobody. Data
come from where the task says, or from a local file. lm-eval is imported when a task is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from harness.gate_ask import generation_of
from harness.samples import METRICS
from harness.usage import UserError, nearest

SHOTS_SEED = 1234  # lm-eval's default: the same examples as its own runs
AIME = Path(__file__).parent.parent / "fixtures" / "tasks" / "aime.yaml"
AIME_NAMES = ("aime24", "aime25", "aime26")
NAMES = re.compile(r"""^(task|group):[ \t]*["']?([\w.+,-]+)""", re.MULTILINE)
INSTALL = "pip install 'kvshard[lm-eval]'"
Rows = list[dict[str, Any]]


class Scored(NamedTuple):
    """What a filter found in an answer, and whether it is right."""

    correct: bool
    answer: str


class Item(NamedTuple):
    """A question: the hash of its document, as in lm-eval's files, and its prompt."""

    key: str
    prompt: str
    about: str = ""  # those of its document's fields that the task's metadata name, such as a page


class Task(NamedTuple):
    """What is asked and how it is scored; `score` takes the number of an item and a text."""

    name: str
    definition: str  # hash of what the task says
    filter: str
    filters: tuple[str, ...]
    shots: int
    data: str
    items: tuple[Item, ...]
    generation: dict[str, Any]
    score: Callable[[int, str], Scored]


class Wanted(NamedTuple):
    """What of a task is wanted, as on the command line."""

    task: str
    data: Path | None = None
    shots_data: Path | None = None
    shots: int | None = None
    limit: int | None = None
    filter: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


def load(wanted: Wanted) -> Task:
    """Raises `UserError` when lm-eval is not there, or task or data cannot be used."""
    if find_spec("lm_eval") is None:
        raise UserError(f"gate run takes its tasks from lm-eval, which is not installed; install it with: {INSTALL}")
    for path in (wanted.data, wanted.shots_data):
        if path is not None and not path.is_file():
            raise UserError(f"{path}: is no file; expected JSON lines with the task's documents")
    with _quiet():
        path = _definition(wanted)
        config = _config(path)
        name = wanted.task if wanted.task in AIME_NAMES else str(config["task"])
        digest = hashlib.sha256(json.dumps(_plain(config), sort_keys=True).encode()).hexdigest()[:16]
        _adjust(config, wanted, path)
        data = _use_data(config, wanted, path)
        made = _made(config, name, data, wanted)
        return _task(made, name, digest, data, wanted)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's bars, its hints for its own command line and its libraries' warnings."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _definition(wanted: Wanted) -> Path:
    """The file of a task. Raises `UserError`."""
    name = wanted.task
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise UserError(f"--task {name}: is no file; expected a task of lm-eval in YAML")
        return Path(name)
    if name in AIME_NAMES and wanted.data is not None:
        return AIME
    root = Path(next(iter(importlib.import_module("lm_eval.tasks").__path__)))
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(root.rglob("*.yaml")):
        for kind, declared in NAMES.findall(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(declared, (kind, path))
    if name not in found:
        if name in AIME_NAMES:
            raise UserError(
                f"--task {name}: lm-eval has no data of it; give a file with --data: id, problem, expected_answer"
            )
        tasks = [each for each, (kind, _) in found.items() if kind == "task"]
        raise UserError(
            f"--task {name!r}: lm-eval has no such task{nearest(name, tasks)} A file TASK.yaml may be given too"
        )
    kind, path = found[name]
    if kind == "group":
        raise UserError(f"--task {name!r} is a group of tasks; expected one task: `lm-eval ls tasks` lists them")
    return path


def _config(path: Path) -> dict[str, Any]:
    """What a file says. Raises `UserError`."""
    try:
        config = importlib.import_module("lm_eval.tasks._yaml_loader").load_yaml(path)
    except Exception as error:
        raise UserError(f"{path}: is no task of lm-eval: {_line(error)}") from error
    needed = [name for name in ("task", "doc_to_text", "doc_to_target") if name not in config]
    if needed:
        has = ", ".join(sorted(map(str, config))) or "nothing"
        raise UserError(f"{path}: is no task of lm-eval: no {', '.join(needed)}; it has {has}")
    kind = config.get("output_type", "generate_until")
    if kind != "generate_until":
        raise UserError(f"{path}: output_type is {kind}; expected generate_until: a task whose answers are written")
    if config.get("repeats", 1) != 1:
        raise UserError(f"{path}: repeats is {config['repeats']}, a vote; expected 1: gate run scores each answer")
    return dict(config)


def _adjust(config: dict[str, Any], wanted: Wanted, path: Path) -> None:
    """Settings of the command line over those of the task. Raises `UserError`."""
    for name in ("tag", "group", "task_list"):
        config.pop(name, None)
    if wanted.shots is not None:
        if config.get("num_fewshot") == 0 and wanted.shots:
            raise UserError(
                f"--shots {wanted.shots}: {path.name} says num_fewshot 0, so it has no examples; leave it out"
            )
        config["num_fewshot"] = wanted.shots
    generation = dict(config.get("generation_kwargs") or {})
    if wanted.max_tokens is not None:
        generation.pop("max_tokens", None)
        generation["max_gen_toks"] = wanted.max_tokens
    if wanted.temperature is not None:
        generation["temperature"] = wanted.temperature
    config["generation_kwargs"] = generation or None


def _use_data(config: dict[str, Any], wanted: Wanted, path: Path) -> str:
    """Local files in place of the task's data set, where there are any; returns what tells data apart."""
    asked = next((config[name] for name in ("test_split", "validation_split") if config.get(name)), None)
    files = _local_files(config, path)
    if wanted.data is not None:
        if asked is None:
            raise UserError(
                f"{path}: has neither test_split nor validation_split; expected a task with one, for --data"
            )
        shots = config.get("fewshot_split") or (config.get("fewshot_config") or {}).get("split")
        files = {asked: wanted.data}
        if config.get("num_fewshot") and shots not in {None, asked}:
            files[shots] = wanted.shots_data or _beside(wanted.data, asked, shots)
    if not files:
        return f"{config.get('dataset_path')}/{config.get('dataset_name')}"
    rows = {split: _rows(file) for split, file in files.items()}
    splits_of = importlib.import_module("datasets").Dataset.from_list
    config.update(
        dataset_path="json",
        dataset_name=None,
        dataset_kwargs=None,
        metadata={"about": (config.get("metadata") or {}).get("about", [])},  # the rest are arguments of a loader
        custom_dataset=lambda **_: {split: splits_of(each) for split, each in rows.items()},
    )
    for name in ("training_split", "validation_split", "test_split"):
        if config.get(name) not in rows:
            config[name] = None
    if not config.get("num_fewshot"):
        config["fewshot_split"] = config["fewshot_split"] if config.get("fewshot_split") in rows else None
    return _digest(rows)


def _local_files(config: Mapping[str, Any], path: Path) -> dict[str, Path]:
    """The files of a task that names files of its own, from its folder on."""
    more = config.get("dataset_kwargs") or {}
    files = more.get("data_files")
    if config.get("dataset_path") != "json" or set(more) != {"data_files"} or not isinstance(files, dict):
        return {}
    found = {split: path.parent / file for split, file in files.items() if isinstance(file, str) and "://" not in file}
    return found if len(found) == len(files) else {}


def _beside(data: Path, asked: str, shots: str) -> Path:
    """The examples' file: named like the other one."""
    name = data.name.replace(asked, shots)
    if name == data.name or not (data.parent / name).is_file():
        where = f"{name} is not beside {data}" if name != data.name else f"{data.name} does not say {asked!r}"
        raise UserError(
            f"--data {data}: examples of the split {shots!r} are needed too, and {where}; give --shots-data FILE"
        )
    return data.parent / name


def _rows(path: Path) -> Rows:
    """Documents of a file. Raises `UserError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected JSON lines") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text ({error.reason}); expected JSON lines") from error
    rows: Rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: is no JSON ({error}); expected an object on each line") from error
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            fields = f" with {', '.join(rows[0])}, as the first one" if rows else ""
            raise UserError(f"{path}:{number}: expected a JSON object{fields}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no document; expected JSON lines")
    return rows


def _digest(rows: Mapping[str, Rows]) -> str:
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False)
    return f"local {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _made(config: dict[str, Any], name: str, data: str, wanted: Wanted) -> Any:
    """lm-eval's task with its prompts. Raises `UserError`."""
    try:
        made = importlib.import_module("lm_eval.api.task").ConfigurableTask(config=config)
        if made.get_config("num_fewshot") is None:
            made.set_config(key="num_fewshot", value=0)
        made.set_fewshot_seed(seed=SHOTS_SEED)
        made.build_all_requests(limit=wanted.limit, rank=0, world_size=1)
    except Exception as error:
        where = wanted.data or data
        step = "does the file fit the task?" if wanted.data else "give a local file with --data, or look at the task"
        raise UserError(f"--task {name}: no prompts come of {where}: {_line(error)}; {step}") from error
    return made


def _task(made: Any, name: str, digest: str, data: str, wanted: Wanted) -> Task:
    pipelines = {each.name: each for each in made._filters}  # noqa: SLF001  # there is no other way to them
    if wanted.filter is not None and wanted.filter not in pipelines:
        near = nearest(wanted.filter, pipelines)
        raise UserError(f"--filter {wanted.filter!r}: {name} has no such filter{near} It has: {', '.join(pipelines)}")
    chosen = wanted.filter or next(iter(pipelines))
    instances = made.instances

    def score(at: int, text: str) -> Scored:
        """Finds the answer and scores it, as lm-eval does with a whole run."""
        one = copy.copy(instances[at])
        one.resps, one.filtered_resps = [text], {}
        pipelines[chosen].apply([one])
        found = one.filtered_resps[chosen]
        return Scored(_right(made.process_results(one.doc, [found]), name), str(found))

    return Task(
        name=name,
        definition=digest,
        filter=chosen,
        filters=tuple(pipelines),
        shots=int(made.get_config("num_fewshot")),
        data=data,
        items=_items(instances, (made.get_config("metadata") or {}).get("about", [])),
        generation=generation_of(instances[0].args[1]),
        score=score,
    )


def _items(instances: list[Any], about: Sequence[str]) -> tuple[Item, ...]:
    """Keys as `harness.samples` makes them of lm-eval's files, so that runs of both clients pair."""
    default = importlib.import_module("lm_eval.utils").handle_non_serializable
    seen: Counter[str] = Counter()
    items = []
    for instance in instances:
        text = json.dumps(instance.doc, indent=2, default=default, ensure_ascii=False)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[key] += 1
        told = ", ".join(f"{name} {instance.doc[name]}" for name in about if name in instance.doc)
        items.append(Item(key if seen[key] == 1 else f"{key}#{seen[key]}", str(instance.args[0]), told))
    return tuple(items)


def _right(metrics: Mapping[str, Any], name: str) -> bool:
    metric = next((each for each in METRICS if each in metrics), None)
    value = None if metric is None else metrics[metric]
    if value not in {0, 1}:
        raise UserError(
            f"--task {name}: scores {dict(metrics)!r}; expected one of {', '.join(METRICS)} with 0 or 1: right or wrong"
        )
    return bool(value)


def _plain(value: Any) -> Any:
    """A definition without what differs between processes: a function is its name."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}".rpartition("/")[2]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
