"""Needs a real NVIDIA card: NVML as the driver answers. Skipped without one.

uv run --group dev pytest -n 0 -m gpu
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nightshift.executors.gpus import PeakMemory, gpu_problems, list_gpus, num_gpus, nvml_session
from tests.conftest import ON_GPU

pytestmark = ON_GPU
HOLD = """
import sys, torch
size = int(torch.cuda.get_device_properties(0).total_memory * 0.3)
held = torch.ones(size, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process with 30 % of the first card's memory."""
    environ = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environ, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_driver_describes_each_card() -> None:
    gpus = list_gpus()
    assert num_gpus(os.environ) <= len(gpus)
    for gpu in gpus:
        assert gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_gb is None or gpu.memory_gb > 1.0


def test_a_card_that_another_process_uses_is_refused(holder: subprocess.Popen[str]) -> None:
    [problem] = gpu_problems(list_gpus()[:1])
    assert "in use" in str(problem)
    with nvml_session() as session:
        peak = PeakMemory((0,), session)
        peak.sample()
    assert peak.peak_gb is not None
    assert peak.peak_gb > 0.25 * (list_gpus()[0].memory_gb or 0.0)
