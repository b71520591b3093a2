"""A server of a tiny target, as vLLM's scheduler would have it, whose drafter's memory lies in pages: slow, and easy to follow.

The target's own K/V are kept by position here; what is tried is what a drafter keeps. A block that nobody owns holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from hspec.decoding.verify import verify_greedy
from hspec.drafters.drafter import Drafter
from hspec.serving.memory import Ran
from hspec.serving.pages import Pages, cpu_vec
from hspec.serving.step import Step, StepDrafter
from hspec.targets.target import Target

BLOCK, BLOCKS = 8, 64
GREEDY = SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=None, structured_outputs=None)


@dataclass
class Simulated:
    """One request. ``tokens`` are all so far, of which ``computed`` lie in its blocks."""

    prompt: Sequence[int]
    tokens: list[int]
    cache: object
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    """Tokens emitted by each step that emitted any."""
    drafted: list[tuple[int, list[int]]] = field(default_factory=list)
    """Of each draft: how many tokens there were, and what was drafted behind them."""


class SimulatedServer:
    """
    Args:
        chunk: rows of a prompt that one step runs at most.
    """

    def __init__(self, target: Target, drafter: Drafter, k: int, chunk: int):
        self.target, self.k, self.chunk = target, k, chunk
        self.runner = StepDrafter(drafter, k)
        assert self.runner.memory is not None and drafter.memory_shape is not None
        shape = drafter.memory_shape
        layers = {i: torch.full((BLOCKS, shape.kv_heads, BLOCK, 2 * shape.head_dim), float("nan")) for i in range(shape.layers)}
        self.runner.memory.pages = Pages(layers, cpu_vec)
        self.runner.memory.writers = {i: self._writer(pages) for i, pages in layers.items()}
        self.free = (torch.randperm(BLOCKS - 1) + 1).tolist()
        self.requests: list[Simulated] = []

    @staticmethod
    def _writer(pages: torch.Tensor):
        keys, values = cpu_vec(pages)

        def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
            for row, slot in enumerate(slots.tolist()):
                keys[slot // BLOCK, :, slot % BLOCK], values[slot // BLOCK, :, slot % BLOCK] = k[row], v[row]

        return write

    def request(self, prompt: Sequence[int], shared: Simulated | None = None) -> Simulated:
        """A new one; with ``shared`` its first blocks are those of another whose prompt begins alike (a prefix hit)."""
        new = Simulated(prompt, list(prompt), self.target.new_cache(1, 400))
        if shared is not None:
            alike = next((i for i, (a, b) in enumerate(zip(prompt, shared.prompt, strict=False)) if a != b), len(prompt))
            hit = min(alike, len(prompt) - 1) // BLOCK
            new.blocks, new.computed = shared.blocks[:hit], hit * BLOCK
            self._target(new, new.tokens[: new.computed])  # in a server its K/V come with the blocks
        self.requests.append(new)
        return new

    def preempt(self, request: Simulated) -> None:
        """Take its blocks back; it is run again from the start."""
        assert self.runner.memory is not None
        left = [b for b in request.blocks if not any(b in other.blocks for other in self.requests if other is not request)]
        for pages in self.runner.memory.pages.layers.values():
            pages[left] = float("nan")
        self.free = [*left, *self.free]
        request.blocks, request.computed, request.drafts = [], 0, []
        request.cache = self.target.new_cache(1, 400)

    def _target(self, request: Simulated, rows: Sequence[int]):
        output = self.target.forward(torch.tensor([list(rows)]), request.cache, self.runner.drafter.taps)
        request.cache.advance([len(rows)])  # type: ignore[attr-defined]
        return output

    @torch.no_grad()
    def step(self, requests: Sequence[Simulated], propose: bool = True) -> None:
        """One forward of the target for all requests; ``propose``: whether vLLM asks for drafts behind it."""
        taps, positions, slots, sampled, drafted, ends, lengths = [], [], [], [], [], [], []
        for r in requests:
            waiting = r.tokens[r.computed : r.computed + self.chunk]
            drafts = r.drafts if r.computed + len(waiting) == len(r.tokens) else []
            rows = [*waiting, *drafts]
            output = self._target(r, rows)
            stop = r.computed + len(rows)
            r.blocks += [self.free.pop() for _ in range(-(-stop // BLOCK) - len(r.blocks))]
            taps.append(output.taps[0])
            positions += range(r.computed, stop)
            slots += [r.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(r.computed, stop)]
            emitted: list[int] = []
            if r.computed + len(waiting) == len(r.tokens):
                logits = self.target.logits(output.hidden)[0, len(waiting) - 1 :]
                verdict = verify_greedy(logits.argmax(-1).tolist(), drafts)
                emitted = [*drafts[: len(verdict.rows) - 1], verdict.token]
                r.computed += len(waiting) + len(emitted) - 1
                r.cache.truncate(0, r.computed)  # type: ignore[attr-defined]
                r.tokens += emitted
                r.runs.append(len(emitted))
            else:
                r.computed += len(waiting)
            sampled.append(emitted)
            drafted.append(len(drafts))
            ends.append(len(positions))
            lengths.append(stop)
            r.drafts = []
        self.runner.memory.remember(Ran(list(torch.cat(taps).unbind(1)), torch.tensor(positions), torch.tensor(slots)))  # type: ignore[union-attr]
        if not propose:
            return
        table = torch.zeros(len(requests), max(len(r.blocks) for r in requests), dtype=torch.int32)
        for row, r in enumerate(requests):
            table[row, : len(r.blocks)] = torch.tensor(r.blocks)
        step = Step(
            [str(i) for i in range(len(requests))], [GREEDY] * len(requests), sampled, drafted, ends, lengths,
            [len(r.tokens) for r in requests], table, list(torch.cat(taps).unbind(1)), self.k, lambda i: requests[i].tokens,
        )  # fmt: skip
        for r, drafts in zip(requests, self.runner.draft(step).tokens, strict=True):
            r.drafts = drafts
            if drafts:
                r.drafted.append((len(r.tokens), drafts))
