"""Write the data of the tiny model's own tasks: `python -m ci.eval_tasks [FOLDER]`, by default into fixtures/tasks.

Questions are in the language that the model is trained in (ci/model_tasks.py): sums that no training document has, and
facts in a few contexts, every page of which holds one and is asked for it. The contexts are shared by their questions,
so an engine reads most of them from its cache, and a page that is lost there loses the item that names it.
The task files beside the data are read by `kvshard gate run --task FILE`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from ci.model_tasks import Tasks

FOLDER = Path(__file__).parent.parent / "fixtures" / "tasks"
SEED = "eval tasks 2"
SUMS = 180
CONTEXTS, PAGES, PAGE_SIZE = 4, 45, 16  # 720 tokens each, and a fact in each page of the smallest topologies' caches

Row = dict[str, Any]


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
    """Every page of every context is asked for its fact, page by page.

    Two contexts alternate, so that requests of one batch read different pages. They fit a device of 2,048 tokens.
    """
    rng = random.Random(f"{SEED} recall")
    made = [tasks.context(rng, PAGES, PAGE_SIZE) for _ in range(CONTEXTS)]
    for first, page, at in product(range(0, CONTEXTS, 2), range(PAGES), range(2)):
        context, questions = made[first + at]
        told = row(context + questions[page].prompt, questions[page].answer)
        yield {"context": first + at, "page": page, **told}


def row(prompt: bytes, answer: bytes) -> Row:
    """A document; the `;` that ends an answer is the task's stop string."""
    return {"prompt": prompt.decode(), "answer": answer.decode().removesuffix(";")}


def write(folder: Path) -> list[Path]:
    """Write both files."""
    tasks, written = Tasks(kinds=1), []
    for name, rows in (("arithmetic", arithmetic(tasks)), ("recall", recall(tasks))):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
