"""What a result file says of the machine it was measured on: its kind, and nothing that names it."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightshift.files import write_atomically

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Cores, CPU model, and the load average of the last minute: timings on a busy machine are longer."""
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
