"""SLURM itself on machines made by namespaces: munged, slurmctld on the head, a slurmd on each node.

Its waits are short: a node is lost after seconds (by default 5 minutes), and what goes back to the queue is held there
until its credentials have expired (by default 2 minutes).
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clusters import nodes
from tests.clusters.nodes import Machines, machines
from tests.executor.launch.events import until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
GPUS = 2  # of each node; character devices stand for them
CONF = """
ClusterName=piper
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
SlurmdTimeout={down_after}
KillWait=5
InactiveLimit=0
MinJobAge=600
ReturnToService=2
JobRequeue=1
MpiDefault=none
GresTypes=gpu
NodeName=n[1-{count}] CPUs=2 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no SLURM can be started here, if so."""
    if missing := [c for c in NEEDED if shutil.which(c) is None]:
        return f"{', '.join(missing)} is not installed (Debian: slurm-wlm)"
    return nodes.why_not()


@dataclass
class Slurm:
    """A running cluster, seen from its head."""

    folder: Path
    machines: Machines

    def run(self, *command: str, code: int | None = 0, **env: str) -> str:
        """A command on the head, to its end; all that it printed."""
        return self.machines.head.run(*command, code=code, SLURM_CONF=self.conf, **env)

    @property
    def conf(self) -> str:
        return str(self.folder / "slurm.conf")

    def daemon(self, number: int) -> None:
        """Start a node's slurmd, and wait until the node may be given work."""
        node = self.machines.made[number]
        line = ["slurmd", "-D", "-f", self.conf, "-N", node.name]
        node.start(*line, log=self.folder / f"{node.name}.out")

    def idle(self, count: int) -> bool:
        """Whether so many nodes wait for work."""
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(count)

    def submit(self, script: Path, *flags: str, **env: str) -> int:
        """`sbatch`; the job's number."""
        said = self.run("sbatch", "--parsable", *flags, str(script), **env)
        return int(said.strip().splitlines()[-1])

    def job(self, number: int) -> dict[str, str]:
        """What SLURM knows of a job."""
        words = self.run("scontrol", "show", "job", str(number)).split()
        return dict(word.partition("=")[::2] for word in words)


@contextlib.contextmanager
def slurm(folder: Path, count: int, down_after: int = 5) -> Iterator[Slurm]:
    """A cluster of `count` nodes. down_after: seconds until a node that does not answer counts as lost."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, count=count, gpus=GPUS, down_after=down_after))
    files = [folder / f"gpu{k}" for k in range(GPUS)]
    for file in files:
        os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3))
    gres = "\n".join(f"NodeName=n[1-{count}] Name=gpu File={file}" for file in files)
    (folder / "gres.conf").write_text(gres + "\n")
    with machines(folder, count) as made:
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        paths = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        paths |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        line = [f"--{name}={folder / file}" for name, file in paths.items()]
        made.head.start("munged", "-F", "--force", *line, log=folder / "munged.out")
        until((folder / "munge.socket").exists)
        found = Slurm(folder, made)
        made.head.start("slurmctld", "-D", "-f", found.conf, log=folder / "ctld.out")
        for number in range(1, count + 1):
            found.daemon(number)
        until(lambda: found.idle(count))
        yield found
