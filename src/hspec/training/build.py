"""From a job to a trainer: target, data and drafter, loaded or made."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

import hspec
from hspec.api import drafter_folder
from hspec.drafters.checkpoint import load_drafter as load_checkpoint
from hspec.drafters.checkpoint import read_config
from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.errors import HSpecError, UsageError
from hspec.files import write_text
from hspec.targets.packing import has_bf16_products
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.checkpoints import Checkpoints
from hspec.training.data import Data, Say, prepare_data
from hspec.training.initialise import check_draft_vocabulary, draft_vocabulary, identity, initialise, mask_token
from hspec.training.job import Job, with_block
from hspec.training.log import cut_log
from hspec.training.plan import RUN_FILE, check_run
from hspec.training.processes import Processes
from hspec.training.shape import choose_shape
from hspec.training.state import PROCESSES, check_same, check_settings
from hspec.training.trainer import ALONE, Trainer


def build(job: Job, folder: Path, resume: bool, say: Say, processes: Processes = ALONE, shard: bool = False) -> Trainer:
    """Load the target, prepare the data, and make the trainer; nothing is trained yet.

    Args:
        say: told what happens, on the first process.
        processes: all of them come here with the same arguments. shard: see :class:`Trainer`.

    Raises:
        UsageError: the preset is for another target, or the folder holds another run, or none to resume.
        HSpecError: data, answers or state cannot be used, or the processes disagree.
    """
    versions = {"the version of hspec": hspec.__version__, "the version of torch": torch.__version__}
    processes.agree(versions | {"--resume": resume, "--shard": shard, "the setting": job.model_dump(mode="json")})
    processes.together(lambda: _check_state(job, folder, processes.count) if resume else check_run(folder, resume))
    target = processes.in_turn(lambda: training_target(job, str(processes.device)))
    data = processes.in_turn(lambda: _data(job, target, say if processes.main else _silent))
    drafter = processes.together(
        lambda: load_checkpoint(folder, target).requires_grad_(True) if resume else new_drafter(job, target, data)
    )
    trainer = Trainer(job.train, target, drafter, data.train, data.held_out, folder, processes, shard)
    if resume:
        trainer.resume()
    else:
        processes.on_main(lambda: _begin(job, folder))
    return trainer


def _check_state(job: Job, folder: Path, count: int) -> None:
    """As far as it can be told before data and target are there, which may take long."""
    check_run(folder, resume=True)
    checkpoints = Checkpoints(folder)
    step = checkpoints.steps()[-1]
    try:
        state = checkpoints.read(step)
    except HSpecError:
        return  # another may be whole
    where = str(checkpoints.place(step))
    check_settings(state["config"], job.train.for_block(read_config(folder).max_draft), where)
    check_same(state["facts"], {PROCESSES: count}, where)


def _silent(_: str) -> None:
    pass


def _data(job: Job, target: Target, say: Say) -> Data:
    data = prepare_data(job, target, say)
    answers = sum(e.supervised_count for e in data.train)
    say(f"{len(data.train):,} documents, {answers:,} tokens of answers; {len(data.held_out)} held out")
    if not data.train:
        raise HSpecError("there is nothing to train on: every prompt is held out, or too long for the target's context")
    if not data.held_out:
        say("no document is held out (3 % of the prompts are, by hash): there will be no validation")
    return data


def _begin(job: Job, folder: Path) -> None:
    """Leave the settings; a run that ended before its first state may have left a log."""
    cut_log(folder, -1)
    write_text(folder / RUN_FILE, yaml.safe_dump(json.loads(job.model_dump_json()), sort_keys=False))


def training_target(job: Job, device: str = "cpu") -> Target:
    """The frozen target as training runs it.

    Raises:
        UsageError: no such target, one without a chat template, or hardware without the products that the job asks for.
    """
    half = job.train.precision == "bf16"
    if half and not has_bf16_products(torch.device(device)):
        raise UsageError("precision bf16 needs hardware with bf16 products (AVX512-BF16, AMX or a recent GPU): use fp32")
    target = load_target(job.target, device, linears="bf16" if half else "packed")
    if not target.tokenizer.chat_template:
        raise UsageError(
            f"{target.name} has no chat template, so there is no telling its turns apart: train on an instruction-tuned model"
        )
    return target


def new_drafter(job: Job, target: Target, data: Data) -> Drafter:
    """A drafter to be trained: of the job's method from its target's layers, or the one that the job begins from."""
    if job.init_from is not None:
        drafter = load_checkpoint(drafter_folder(job.init_from, target.name), target)
        check_draft_vocabulary(drafter.draft_ids, target)
        slots = max(drafter.config.max_draft, job.train.slots or 0)
        drafter.config = _for_target(with_block(drafter.config, slots), target)
        return drafter.requires_grad_(True)
    config = choose_shape(job.preset, target.name, target.config, job.method, job.drafter, job.match_parameters)
    if job.train.slots is not None:
        config = with_block(config, job.train.slots)
    config = _for_target(config, target)
    if isinstance(config, ParallelConfig) and config.injects and config.mask_token_id is None:
        # The formats that servers load have no mask vector, but name a row of the target's embedding.
        config = config.model_copy(update={"mask_token_id": mask_token(target)})
    draft_ids = draft_vocabulary(data.train, target, config.draft_vocab_size)
    sample = torch.tensor([data.train[0].tokens])
    return initialise(config, target, draft_ids, job.train.seed, sample, job.copy_layers)


def _for_target(config: DrafterConfig, target: Target) -> DrafterConfig:
    """The configuration with the identity of the target that it is trained on."""
    return type(config).model_validate({**config.model_dump(), "target": identity(target).model_dump()})
