"""A drafter while it learns: its weights, their average and the optimiser's memory, on one process or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hspec.drafters.drafter import Drafter
from hspec.training.blocks import BlockBatch
from hspec.training.config import TrainConfig
from hspec.training.loss import BlockLoss, LossSums
from hspec.training.objective import LossWeights
from hspec.training.optimiser import learning_rate, load_state, make_optimiser, set_learning_rate, state_of
from hspec.training.parallel import Step, distribute, gathered, own, shared_out_like, whole
from hspec.training.processes import Processes


class Learner:
    """With several processes each has one, and all come to every method together.

    Args:
        drafter: trainable, fp32; alike on all processes. shard: each keeps a share of it (FSDP2) and not all (DDP).
    """

    def __init__(self, drafter: Drafter, loss: BlockLoss, config: TrainConfig, processes: Processes, shard: bool):
        self.drafter, self.config, self.processes = drafter, config, processes
        self._module = distribute(Step(drafter, loss), processes, shard)
        self.optimiser = make_optimiser(drafter, config)
        self.ema = {name: p.detach().clone() for name, p in drafter.named_parameters()}

    # -- one step ------------------------------------------------------------------------------------------------

    def loss(self, blocks: BlockBatch, weights: LossWeights, done: float) -> tuple[Tensor, LossSums]:
        """The sum of this process's losses, to be handed to :meth:`gradients`, and what it is made of."""
        self.optimiser.zero_grad(set_to_none=True)
        with self.processes.connected():
            return self._module(blocks, weights, done)

    def gradients(self, total: Tensor, normaliser: float) -> float:
        """Of the loss of all processes, their totals by the sum of their normalisers; clipped. Returns their norm before."""
        with self.processes.connected():
            # Backward leaves the mean over processes of what each has.
            (total * (self.processes.count / normaliser)).backward()
            return float(whole(nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)))

    def update(self, step: int) -> None:
        """Let the gradients of optimiser step ``step`` (from 0) change the weights, and the weights their average."""
        set_learning_rate(self.optimiser, learning_rate(self.config, step))
        self.optimiser.step()
        decay = min(self.config.ema, (2 + step) / (11 + step))
        weights = [own(p.detach()) for p in self.drafter.parameters()]
        torch._foreach_lerp_([own(average) for average in self.ema.values()], weights, 1 - decay)

    # -- the average ---------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts the drafter has the averaged weights, whole on every process."""
        mine = {name: p.detach().clone() for name, p in self.drafter.named_parameters()}
        try:
            self._load(self.ema)
            with gathered(self._module):
                yield
        finally:
            self._load(mine)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.drafter.named_parameters():
            own(p).copy_(own(weights[name]))

    def average(self) -> dict[str, Tensor]:
        """The averaged weights as whole tensors, by name."""
        return {name: whole(average) for name, average in self.ema.items()}

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything as whole tensors, as if one process had trained."""
        return {
            "drafter": {name: whole(p.detach()) for name, p in self.drafter.named_parameters()},
            "ema": self.average(),
            "optimiser": state_of(self.optimiser),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` gave, on the CPU.

        Raises:
            ValueError: it is of a drafter of another shape.
        """
        for name, p in self.drafter.named_parameters():
            for weights, place in ((state["drafter"], p), (state["ema"], self.ema[name])):
                if name not in weights or weights[name].shape != p.shape:
                    raise ValueError(f"{name} is missing, or not {list(p.shape)}")
                place.copy_(shared_out_like(weights[name], p))
        load_state(self.optimiser, state["optimiser"])
