"""The faults that benchmarks/verify.py puts into the program fit its source."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from verify_context_faults import CONTEXT_FAULTS  # noqa: E402
from verify_faults import FAULTS, Fault  # noqa: E402
from verify_mixture_faults import MIXTURE_FAULTS  # noqa: E402
from verify_packing_faults import PACKING_FAULTS  # noqa: E402

sys.path.pop(0)  # the module `planner` there would hide the folder tests/planner


@pytest.mark.parametrize(
    "fault", (*FAULTS, *MIXTURE_FAULTS, *PACKING_FAULTS, *CONTEXT_FAULTS), ids=lambda fault: fault.name
)
def test_a_fault_fits(tmp_path: Path, fault: Fault) -> None:
    path = Path(fault.target.partition(":")[0].replace(".", "/") + ".py")
    (tmp_path / path.parent).mkdir(parents=True)
    shutil.copy(ROOT / path, tmp_path / path)
    fault.put_into(tmp_path)
    changed = (tmp_path / path).read_text(encoding="utf-8")
    assert changed != (ROOT / path).read_text(encoding="utf-8")
    compile(changed, str(path), "exec")
