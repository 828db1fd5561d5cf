"""Write docs/api.md, the reference of the Python interface and of the extension points, from docstrings.

python tools/document_api.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron import api
from megatron.checkpoint.formats import Format
from megatron.cli import Parser, run_command, summary
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.optim.spec import OptimizerSpec, StepInputs
from megatron.optim.step_skipper import StepRule
from megatron.reports.writers import Writer
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import PluginConfig

# Title of each section, and the objects that it documents. The configuration has a table of its own.
SECTIONS: dict[str, list[Any]] = {
    "Training": [api.train, api.Run, api.main, api.configure],
    "Tasks": [api.Task, api.EvalMetric, api.Dataset, api.Batch, api.GPTBatch, api.GPTSamples],
    "Models": [api.parameter, api.normal, api.zeros, api.ones, api.ModelContext, api.Chunk],
    "Between steps": [api.Hook, api.Trainer, Writer],
    "Optimizers and schedules": [OptimizerSpec, StepInputs, api.Schedule, StepRule, BatchSchedule],
    "Flags and formats": [Config, flag, PluginConfig, Format],
    "Errors": [api.InputError, api.TrainingFault],
}

HEADER = """\
# Python

`megatron.api` is the Python interface for training. [extending.md](extending.md) shows how its parts are used. Objects
of other modules are named with their module. [Generation](generation.md#from-python),
[evaluation](evaluation.md#from-python) and [captures](verify.md#captures) have their own modules, described on their
pages.

`python tools/document_api.py` writes this page from the docstrings.
"""


def api_page() -> str:
    """The whole page."""
    page = HEADER
    for title, objects in SECTIONS.items():
        page += f"\n## {title}\n" + "".join(_entry(thing) for thing in objects)
    return page + _configuration()


def _configuration() -> str:
    """The table of the configuration's sections."""
    configs = {
        name: getattr(api, name) for name in api.__all__ if name.endswith("Config") and name != "RunConfig"
    }
    rows = [f"| `{name}` | {summary(config)} |\n" for name, config in sorted(configs.items())]
    return (
        "\n## Configuration\n\nArguments of `train` and `configure`. The fields are the flags of the section in "
        "[flags.md](flags.md), with underscores; a flag `--no-x` is a field `x` that is true by default.\n\n"
        "| | |\n|---|---|\n" + "".join(rows)
    )


def _entry(thing: Any) -> str:
    """Heading, signature and docstring of a function or a class, and those of a class's documented methods."""
    name, module = thing.__name__, thing.__module__
    shown = name if name in api.__all__ else f"{module}.{name}"
    text = f"\n### {shown}\n\n"
    if inspect.isfunction(thing):
        return text + _code(name, thing) + _prose(thing)
    text += _prose(thing)
    for member, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(value, property):
            text += f"**`{member}`**: {_prose(function).strip()}\n\n"
        else:
            text += _code(member, function) + _prose(function)
    return text.rstrip("\n") + "\n"


def _code(name: str, function: Any) -> str:
    """The signature as code, over several lines if it is long."""
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    signature = signature.replace(parameters=parameters)
    line = f"{name}{signature}".replace("'", "")
    return f"```python\n{line}\n```\n\n"


def _prose(thing: Any) -> str:
    """A docstring as Markdown: sections such as Args become lists."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    if dataclasses.is_dataclass(thing) and (thing.__doc__ or "").startswith(
        f"{getattr(thing, '__name__', '')}("
    ):
        lines = []  # made by dataclasses
    return "\n".join(_markdown(lines)).strip() + "\n\n"


def _markdown(lines: Sequence[str]) -> Iterator[str]:
    section = ""
    for line in lines:
        if match := re.fullmatch(r"(Attributes|Args|Returns|Raises):", line):
            section = match[1]
            yield f"**{section}**"
            yield ""
        elif section and (match := re.fullmatch(r"    ([\w, *]+): (.*)", line)):
            yield f"- `{match[1]}`: {match[2]}"
        elif section and line.startswith("    "):
            yield f"  {line.strip()}" if line.startswith("        ") else line.strip()
        else:
            section = section if not line else ""
            yield line


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    path, page = ROOT / "docs" / "api.md", api_page()
    if not parser.parse_args(argv).check:
        path.write_text(page, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != page:
        raise InputError("docs/api.md is out of date; run python tools/document_api.py")


if __name__ == "__main__":
    run_command(main)
