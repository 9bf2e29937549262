"""A real SLURM on this machine: two nodes of four GPUs that are none, for tests. Needs root and Debian's slurm-wlm."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift.executors.slurm import SlurmConfig

CONFIG = SlurmConfig(pairs=4, gpus=2, cpus_per_run=2, mem_gb=2, time_minutes=20)
NODES = ("n1", "n2")
CORES, GPUS = 8, 4  # of a node, as its configuration says
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")


def missing() -> str | None:
    """Why there can be none here."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge" if absent else None


def free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """slurmctld and two slurmd, on ports of their own, in `folder`, with a munged of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, free_ports(1 + len(NODES))
        self.conf = folder / "slurm.conf"
        self.environ = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def start(self) -> None:
        """Up and idle, or TimeoutError."""
        for name in ("state", "log", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        for number in range(GPUS):
            os.mknod(self.folder / f"nvidia{number}", 0o600 | 0o020000, os.makedev(1, 3))
        self._munge()
        self._configure()
        self.ask("slurmctld", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        self.wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"])

    def _munge(self) -> None:
        """A munged of its own: the machine's, if there is one, is left alone."""
        named = {
            name: self.folder / "munge" / name for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        }
        named["key-file"].parent.mkdir(mode=0o711)
        named["key-file"].touch(0o600)
        named["key-file"].write_bytes(os.urandom(128))
        # --force: it warns of folders above that others may write, as /tmp is.
        self.ask("munged", "--force", *(f"--{name}={path}" for name, path in named.items()))

    def _configure(self) -> None:
        host, at = socket.gethostname().partition(".")[0], self.folder
        lines = f"""ClusterName=nightshift
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge/socket
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/log/slurmctld.log
SlurmdLogFile={at}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_min_interval=200000,bf_interval=5
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
DebugFlags=NO_CONF_HASH
"""
        for node, port in zip(NODES, self.ports[1:], strict=True):
            lines += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            lines += f"CPUs={CORES} RealMemory=8000 Gres=gpu:{GPUS} State=UNKNOWN\n"
        lines += f"PartitionName=gpu Nodes={','.join(NODES)} Default=YES MaxTime=60 State=UP\n"
        lines += f"PartitionName=urgent Nodes={','.join(NODES)} PriorityTier=10 MaxTime=60 State=UP\nFirstJobId=1\n"
        self.conf.write_text(lines)
        gpus = f"{at}/nvidia[0-{GPUS - 1}]"
        (at / "gres.conf").write_text("".join(f"NodeName={node} Name=gpu File={gpus}\n" for node in NODES))
        (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def start_node(self, node: str) -> None:
        self.ask("slurmd", "-N", node, "-f", str(self.conf))

    def kill(self, name: str) -> None:
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def ask(self, *command: str) -> str:
        """What a command of SLURM says; CalledProcessError where it fails."""
        done = subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    def wait_until(self, is_so: object) -> None:
        """Ask again and again; a controller that is away has said nothing."""
        ends_at = time.monotonic() + 180.0
        while time.monotonic() < ends_at:
            try:
                if is_so():  # type: ignore[operator]
                    return
            except subprocess.CalledProcessError:
                pass
            time.sleep(0.1)
        log = (self.folder / "log/slurmctld.log").read_text().splitlines()[-30:]
        raise TimeoutError("\n".join([self.ask("sinfo", "-N", "-l"), self.ask("scontrol", "show", "job"), *log]))

    def calm_nodes(self) -> None:
        """Both nodes accept jobs."""

        def is_idle() -> bool:
            states = self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            for node in (line.split()[0] for line in states if "drain" in line or "down" in line):
                self.ask("scontrol", "update", f"nodename={node}", "state=resume")
            return {line.split()[1] for line in states} == {"idle"}

        # "idle*": a ping of before the node's new daemon failed; the next one may be two minutes away.
        self.wait_until(is_idle)

    def stop(self) -> None:
        """End the daemons, and the jobs that they watch."""
        subprocess.run(["scancel", "--user=root"], env=self.environ, check=False, capture_output=True)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munge/pid-file"):
            path = self.folder / (name if "/" in name else f"{name}.pid")
            if path.exists():
                try:
                    os.kill(int(path.read_text()), signal.SIGTERM)
                except ProcessLookupError:
                    continue


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster for the tests of a module."""
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    made.start()
    yield made
    made.stop()
