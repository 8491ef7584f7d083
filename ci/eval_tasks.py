"""Write the data of the tiny model's own tasks: `python -m ci.eval_tasks [FOLDER]`, by default into fixtures/tasks.

Questions are in the language that the model is trained in (ci/model_tasks.py): sums that no training document has, and
facts in a context of eight pages. The task files beside the data are read by `kvshard gate run --task FILE`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from ci.model_tasks import Tasks

FOLDER = Path(__file__).parent.parent / "fixtures" / "tasks"
SEED = "eval tasks 1"
SUMS = 100
FACTS = 64
PAGES = 8

Row = dict[str, str]


def arithmetic(tasks: Tasks) -> Iterator[Row]:
    """Sums in words, each once."""
    rng = random.Random(f"{SEED} arithmetic")
    seen: set[bytes] = set()
    while len(seen) < SUMS:
        (question,) = tasks.sums(rng, 1)
        if question.prompt not in seen:
            seen.add(question.prompt)
            yield row(question.prompt, question.answer)


def recall(tasks: Tasks) -> Iterator[Row]:
    """A fact from anywhere in a context, each in a context of its own."""
    rng = random.Random(f"{SEED} recall")
    for _ in range(FACTS):
        context, questions = tasks.context(rng, PAGES)
        question = rng.choice(questions)
        yield row(context + question.prompt, question.answer)


def row(prompt: bytes, answer: bytes) -> Row:
    """A document; the `;` that ends an answer is the task's stop string."""
    return {"prompt": prompt.decode(), "answer": answer.decode().removesuffix(";")}


def write(folder: Path) -> list[Path]:
    """Write both files."""
    tasks, written = Tasks(), []
    for name, rows in (("arithmetic", arithmetic(tasks)), ("recall", recall(tasks))):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
