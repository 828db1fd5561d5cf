"""Find a model that `megatron plan` knows by the names that people use for it."""

from __future__ import annotations

import difflib
import re

from megatron.errors import InputError
from megatron.planner.dense import DENSE
from megatron.planner.mixtures import MIXTURES
from megatron.planner.models import MODELS, Preset, Published

NAMED: dict[str, Published | Preset] = {**MODELS, **DENSE, **MIXTURES}
# Other names of a model, or of one with the same shapes.
ALIASES = {
    "gpt2-124m": "gpt2",
    "gpt2-small": "gpt2",
    "gpt2-345m": "gpt2-medium",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "llama1-7b": "llama-7b",
    "llama1-65b": "llama-65b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.3-70b": "llama3-70b",
    "llama3-405b": "llama3.1-405b",
    "mistral": "mistral-7b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mixtral": "mixtral-8x7b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "deepseek": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
}
# Ends of names that say how a model was trained further, or in which form it is published.
_ENDS = r"(-(instruct|chat|base|hf|it|pt|v0\.\d|\d{4}))+$"
NUM_CLOSE = 6  # names in an error


def find_preset(name: str) -> tuple[str, Published | Preset]:
    """A model and the planner's name for it. Hyphens, capitals, the owner of a repository and ends such as -Instruct do
    not matter, and a size alone names the only model that has it.

    Raises:
        InputError: there is no such model, or there are several; the message lists them.
    """
    known = {_simplified(known): known for known in (*NAMED, *ALIASES)}
    wanted = name if name in NAMED else _simplified(name)
    found = wanted if wanted in NAMED else known.get(wanted)
    if found is None:
        several = sorted({_target(name) for name in known.values() if wanted in _parts(name)})
        if len(several) > 1:
            raise InputError(f"--model: {name!r} may be one of {', '.join(several)}; choose one")
        if several:
            found = several[0]
    if found is None:
        close = difflib.get_close_matches(wanted, known, n=NUM_CLOSE, cutoff=0.5)
        names = list(dict.fromkeys(_target(known[key]) for key in close)) or list(NAMED)
        raise InputError(
            f"--model: {name!r} is not a known model; {'close' if close else 'known'} are {', '.join(names)}; others "
            "are described by the flags of their shape"
        )
    return _target(found), NAMED[_target(found)]


def _parts(name: str) -> set[str]:
    """Beginnings and ends of a name, such as its family and its size."""
    words = name.split("-")
    cuts = range(1, len(words))
    return {_simplified("-".join(part)) for cut in cuts for part in (words[:cut], words[cut:])}


def _target(name: str) -> str:
    return ALIASES.get(name, name)


def _simplified(name: str) -> str:
    """A name without what does not distinguish models: "meta-llama/Meta-Llama-3-8B-Instruct" becomes "llama38b"."""
    name = re.sub(_ENDS, "", name.lower().rsplit("/", 1)[-1].removeprefix("meta-"))
    return re.sub(r"[-_ ]", "", name)
