"""GSM8K answers scored as lm-eval's stock task gsm8k, version 3, does it: two ways to find an answer, one to compare.

    strict-match      the first "#### number"
    flexible-extract  the last number of the text

Both compare texts, not values, so 26.0 is not 26. That is what the published scores are made with.
"""

from __future__ import annotations

import enum
import re

INVALID = "[invalid]"
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_UP_TO_ANSWER = re.compile(r".*#### ", re.DOTALL)


class Filter(enum.StrEnum):
    """How the answer is found, by lm-eval's names."""

    STRICT = "strict-match"
    FLEXIBLE = "flexible-extract"


def extracted(text: str, by: Filter) -> str:
    """The answer of a text as it stands there, or `INVALID`."""
    if by is Filter.STRICT:
        found = _STRICT.search(text)
        return found[1].strip() if found else INVALID
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]).strip() if numbers else INVALID


def normalised(answer: str) -> str:
    """Without commas, dollar signs, all that comes before "#### " and one full stop at the end; in lower case."""
    without = _UP_TO_ANSWER.sub("", answer.replace(",", "").replace("$", ""))
    # `$` of a regular expression also matches before a last line break, so the full stop may stand before one
    return re.sub(r"\.$", "", without).lower()


def is_correct(text: str, target: str, by: Filter) -> bool:
    """Whether a text holds the answer that ends the target, which is "... #### 18" as in the data set."""
    return normalised(extracted(text, by)) == normalised(target)
