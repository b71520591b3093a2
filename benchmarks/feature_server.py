"""A trainer whose target's layers run in its own process against one that asks a feature server: blocks a second, and memory.

    python benchmarks/feature_server.py [--config JOB.yaml] [--steps 5] [--threads 1]

Both train alike, one after the other, each in a new process; the server is a third one, on the same processors. Where there is only one
processor nothing can overlap: what the server costs beside the forward that it takes over is then all that blocks a second can show.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hspec.cli.options import prefer_large_pages
from hspec.evaluation.study import read_study
from hspec.training.build import new_drafter, training_target
from hspec.training.data import prepare_data
from hspec.training.feature_server import FeatureServerConfig
from hspec.training.job import Job, read_job
from hspec.training.trainer import Trainer

WARM_UP = 2


def usual_job() -> Job:
    """The comparison's, on the answers of the data: what the text says makes no difference to time."""
    return read_study(None).job.model_copy(update={"own_answers": False, "max_prompts": 500})


def measured(job: Job, steps: int) -> dict[str, Any]:
    """This process's part, over steps of whole blocks."""
    target = training_target(job)
    loaded = memory()
    data = prepare_data(job, target, lambda line: None)
    trainer = Trainer(job.train, target, new_drafter(job, target, data), data.train, data.held_out, Path(tempfile.mkdtemp()))
    trainer.step = int(job.train.steps * 0.9)
    for _ in range(WARM_UP):
        trainer.train_step()
    before, began, spent = trainer.blocks_seen, time.monotonic(), time.process_time()
    losses = [float(trainer.train_step()[0].total.detach()) for _ in range(steps)]
    seconds, core = time.monotonic() - began, time.process_time() - spent
    return {
        "blocks": trainer.blocks_seen - before,
        "blocks_a_second": (trainer.blocks_seen - before) / seconds,
        "core_seconds_a_step": core / steps,
        "megabytes_of_its_own_with_the_target": loaded,
        "megabytes_of_its_own_at_the_end": memory(),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "losses": losses,
    }


def memory() -> float:
    """Megabytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def processor_seconds(pid: int) -> float:
    """Of a process, so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at", help="measure this process alone, with its target's layers there, or 'here'")
    asked = parser.parse_args()
    job = usual_job() if asked.config is None else read_job(asked.config)
    if asked.at is not None:
        torch.set_num_threads(asked.threads)
        server = None if asked.at == "here" else FeatureServerConfig(at=(asked.at,))
        print(json.dumps(measured(job.model_copy(update={"feature_server": server}), asked.steps)))
        return

    def trainer(at: str) -> dict[str, Any]:
        done = subprocess.run([sys.executable, *sys.argv, "--at", at], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/features"
        threads = ["--threads", str(asked.threads)]
        command = [sys.executable, "-m", "hspec.cli", "serve-features", job.target, "--listen", address, "--precision"]
        here = trainer("here")
        server = subprocess.Popen([*command, job.train.precision, *threads], stdout=subprocess.DEVNULL)
        try:
            while not Path(f"{folder}/features").exists() and server.poll() is None:
                time.sleep(0.1)
            spent = processor_seconds(server.pid)
            served = trainer(address)
            # It has begun with the batch behind the last one.
            batches = asked.steps + WARM_UP + 1
            served["core_seconds_a_batch_of_the_server"] = (processor_seconds(server.pid) - spent) / batches
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"precision": job.train.precision, "stream": here, "server": served}, indent=1))


if __name__ == "__main__":
    prefer_large_pages()
    main()
