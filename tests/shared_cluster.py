"""Runs the Ray cluster that all processes of one test run share, and stops it when the run's first process ends.

    python shared_cluster.py FOLDER CPUS

FOLDER belongs to the run. It holds `alive`, a named pipe that the run's first process keeps open: it closes however
that process ends, and no process is left behind. `running` is locked as long as the cluster is up.
"""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

import ray

from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect


def main(folder: Path, cpus: int) -> None:
    """Start the cluster, print what a process needs in its environment to join it, and wait for the run's end."""
    alive = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)  # blocking would wait for ever after the run's end
    os.set_blocking(alive, True)
    with (folder / "running").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with connect(ResourcesConfig(local_cpus=cpus)):
            environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            sys.stdout.write(json.dumps(environment) + "\n")
            sys.stdout.flush()
            os.read(alive, 1)
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed; any other has removed it


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
