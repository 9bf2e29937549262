"""Results: as JSON with the kind of the machine that they were measured on, which nothing names, and as a table."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.files import write_atomically

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Cores, CPU model, and the load average of the last minute: timings are longer under load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "cpu": names[0] if names else platform.machine(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def write_result(output: Path, command: str, figures: dict[str, Any], kind: dict[str, Any]) -> None:
    """The result as JSON: when, how and on what it was measured, then the figures."""
    head = {"date": datetime.now(UTC).date().isoformat(), "command": command, "machine": kind}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        output, (json.dumps({**head, "python": platform.python_version(), **figures}, indent=1) + "\n").encode()
    )


def standard_error(values: NDArray[np.float64]) -> float | None:
    """Return the standard error of the mean; None for one value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A head and a line for each row. `columns`: key of a row -> format, such as `>9.1f`; what is None stays empty."""
    widths = {name: re.sub(r"[+]|,?\.\d+f", "", form) for name, form in columns.items()}
    lines = ["".join(format(name.replace("_", " "), widths[name]) for name in columns)]
    for row in rows:
        cells = (
            format("", widths[name]) if row[name] is None else format(row[name], columns[name]) for name in columns
        )
        lines.append("".join(cells))
    return "\n".join(lines)
