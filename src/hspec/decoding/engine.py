"""The one decoding loop, for every method and for none: propose, verify, accept, stop.

After a step the target has run every token before the anchor; the anchor is the last sampled token. A step drafts k tokens
behind the anchor, runs ``[anchor, d_1 .. d_k]`` through the target in one forward, and keeps what the acceptance rule allows.
Without a drafter k is 0 and the same loop is plain decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hspec.decoding.draft_sampler import DraftSampler
from hspec.decoding.processors import process
from hspec.decoding.randomness import Purpose, uniform
from hspec.decoding.sequence import Request, Result, Sequence
from hspec.decoding.verify import Verdict, verify_greedy, verify_sampled
from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.errors import UsageError
from hspec.targets.cache import KVCache
from hspec.targets.target import Target


class Drafter(Protocol):
    """What the loop needs of a drafter."""

    draft_ids: Tensor

    @property
    def taps(self) -> SequenceOf[int]: ...
    @property
    def max_draft(self) -> int: ...
    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft: ...


@dataclass(frozen=True)
class Step:
    """What one step gave one sequence, for streaming."""

    index: int
    """Which of the requests."""
    tokens: list[int]
    drafted: list[bool]
    text: str
    result: Result | None
    """Set with the request's last step."""


class Engine:
    """Decodes requests in batches; each request's text is independent of its neighbours.

    Args:
        drafter: None for plain decoding.
        k: drafted tokens a step; None takes the drafter's largest.
        max_batch: requests that run at once; more wait, and enter as others finish.

    Raises:
        UsageError: k is not one that the drafter was trained for, or no request may run.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, k: int | None = None, max_batch: int = 16):
        self.target, self.drafter, self.max_batch = target, drafter, max_batch
        self.k = 0 if drafter is None else drafter.max_draft if k is None else k
        if drafter is not None and not 1 <= self.k <= drafter.max_draft:
            raise UsageError(f"k = {self.k} drafted tokens, but this drafter was trained for 1 to {drafter.max_draft}")
        if max_batch < 1:
            raise UsageError(f"max_batch = {max_batch}, but at least one request must run at a time")
        self.taps = () if drafter is None else tuple(drafter.taps)

    # -- whole requests ------------------------------------------------------------------------------------------

    def generate(self, requests: SequenceOf[Request]) -> list[Result]:
        """Decode all requests; results in their order."""
        results: dict[int, Result] = {s.index: s.result for s in self.stream(requests) if s.result is not None}
        return [results[i] for i in range(len(requests))]

    @torch.no_grad()
    def stream(self, requests: SequenceOf[Request], cache: KVCache | None = None, reuse: int = 0) -> Iterator[Step]:
        """Decode and give every step as it happens.

        Args:
            cache: a cache of one row to run a single request in, kept by the caller; its first ``reuse`` tokens are the
                prompt's and are not run again. Afterwards it holds the prompt and the emitted tokens but the last.

        Raises:
            UsageError: an empty prompt, or one that leaves no room in the target's context.
        """
        for request in requests:
            self._check(request)
        waiting = deque(enumerate(requests))
        if not requests:
            return
        if cache is None:
            capacity = max(self._room(request) for request in requests)
            cache = self.target.new_cache(min(self.max_batch, len(requests)), capacity)
        elif len(requests) != 1 or cache.batch != 1 or not 0 <= reuse <= cache.lengths[0]:
            raise AssertionError(f"a kept cache is for one request; {reuse} tokens to reuse, lengths are {cache.lengths}")
        running: list[tuple[int, Sequence]] = []
        while waiting or running:
            while waiting and len(running) < cache.batch:
                index, request = waiting.popleft()
                sequence = self._admit(request, cache, len(running), reuse)
                running.append((index, sequence))
                yield self._report(index, sequence, 1)
            self._retire(running, cache)
            if running:
                emitted = self._step([s for _, s in running], cache)
                for (index, sequence), count in zip(running, emitted, strict=True):
                    yield self._report(index, sequence, count)
                self._retire(running, cache)

    def _check(self, request: Request) -> None:
        limit = self.target.max_positions
        if not request.prompt:
            raise UsageError("the prompt is empty: give at least one token")
        if len(request.prompt) >= limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens, the target's context is {limit}: shorten it by at least "
                f"{len(request.prompt) - limit + 1}"
            )
        bad = [t for t in request.prompt if not 0 <= t < self.target.vocab_size]
        if bad:
            raise UsageError(f"token {bad[0]} is not in the target's vocabulary of {self.target.vocab_size}")

    def _room(self, request: Request) -> int:
        """Rows that a request may stage at most. Drafts may be staged past the context's end: they are never verified."""
        return min(len(request.prompt) + request.params.max_tokens, self.target.max_positions) + self.k

    # -- one step ------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, cache: KVCache, row: int, reuse: int) -> Sequence:
        sequence = Sequence(request, self.target.tokenizer, self.target.eos_ids)
        cache.lengths[row] = reuse  # at once, so that an interrupted prefill leaves nothing that looks valid
        own = cache.rows(row, row + 1)
        prompt = torch.tensor([request.prompt[reuse:]], device=self.target.device)
        output = self.target.prefill(prompt, own, self.taps)
        cache.lengths[row] = own.lengths[0]
        sequence.taps = output.taps[0, -1]
        logits = self.target.logits(output.hidden[:, -1])
        verdict = self._judge(sequence, logits, [], None)
        sequence.emit_first(verdict.token)
        self._stop_at_context(sequence)
        return sequence

    def _step(self, running: list[Sequence], cache: KVCache) -> list[int]:
        """Draft, verify and accept for every running sequence; returns how many tokens each emitted."""
        used = cache.rows(0, len(running))
        anchors = torch.tensor([[s.anchor] for s in running], device=self.target.device)
        k = min(self.k, cache.capacity - 1 - max(s.length for s in running))
        draft = self._propose(running, used, anchors, k) if k > 0 else None
        tokens = anchors if draft is None else torch.cat((anchors, draft.tokens), dim=1)
        output = self.target.forward(tokens, used, self.taps)
        logits = self.target.logits(output.hidden)
        drafts = [[] for _ in running] if draft is None else draft.tokens.tolist()
        # Each request's own limit, so that a neighbour near its end does not change where this one's drafts are tested.
        drafts = [own[: self.target.max_positions - s.length - 2] for s, own in zip(running, drafts, strict=True)]
        verdicts = self._verdicts(running, logits, drafts, None if draft is None else draft.probabilities)
        emitted = []
        for row, (sequence, verdict) in enumerate(zip(running, verdicts, strict=True)):
            sequence.taps = output.taps[row, verdict.accepted]
            emitted.append(sequence.emit_step(drafts[row], verdict.accepted, verdict.token))
            cache.lengths[row] = sequence.length
            self._stop_at_context(sequence)
        return emitted

    def _propose(self, running: list[Sequence], used: KVCache, anchors: Tensor, k: int) -> Draft:
        assert self.drafter is not None
        positions = [s.length for s in running]
        context = DraftContext(
            anchors=anchors,
            positions=torch.tensor(positions, device=anchors.device)[:, None],
            taps=torch.stack([s.taps for s in running if s.taps is not None])[:, None],
            kv=used.view(),
        )
        histories = [self._history(s) for s in running]
        sampler = DraftSampler([s.params for s in running], positions, self.drafter.draft_ids, histories)
        return self.drafter.propose(context, k, sampler)

    def _verdicts(self, running: list[Sequence], logits: Tensor, drafts: list[list[int]], q: Tensor | None) -> list[Verdict]:
        if all(s.params.plain for s in running):
            return [verify_greedy(t, d) for t, d in zip(logits.argmax(-1).tolist(), drafts, strict=True)]
        return [
            self._judge(
                s, logits[row, : len(drafts[row]) + 1], drafts[row], None if q is None or s.params.drafts_greedily else q[row]
            )
            for row, s in enumerate(running)
        ]

    def _judge(self, sequence: Sequence, logits: Tensor, drafts: list[int], q: Tensor | None) -> Verdict:
        """Apply the request's processors and acceptance rule to its ``[k + 1, vocabulary]`` logits."""
        params = sequence.params
        processed = process(logits, params, self._history(sequence), drafts)
        if params.greedy:
            return verify_greedy(processed.argmax(-1).tolist(), drafts)
        first = len(sequence.request.prompt) + len(sequence.tokens)  # position of the first token to be emitted
        places = range(first, first + len(drafts) + 1)
        return verify_sampled(
            processed.softmax(-1),
            drafts,
            q,
            None if self.drafter is None else self.drafter.draft_ids,
            [uniform(params.seed, p, Purpose.ACCEPT) for p in places],
            [uniform(params.seed, p, Purpose.TARGET) for p in places],
        )

    def _history(self, sequence: Sequence) -> Tensor | None:
        """Distinct tokens so far of a request that penalises them."""
        if sequence.params.repetition_penalty == 1.0:
            return None
        return torch.tensor(sorted({*sequence.request.prompt, *sequence.tokens}), device=self.target.device)

    def _stop_at_context(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None and sequence.length + 1 >= self.target.max_positions:
            sequence.finish_reason = "length"

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _retire(self, running: list[tuple[int, Sequence]], cache: KVCache) -> None:
        """Drop finished sequences; the last one takes a freed row, so that rows in use stay a prefix of the batch."""
        for row in range(len(running) - 1, -1, -1):
            if running[row][1].finish_reason is not None:
                last = len(running) - 1
                if row != last:
                    cache.move_row(last, row)
                    running[row] = running[last]
                running.pop()

    def _report(self, index: int, sequence: Sequence, count: int) -> Step:
        done = sequence.finish_reason is not None
        result = sequence.result() if done else None
        text = sequence.text.take(final=done)
        return Step(index, sequence.tokens[-count:], sequence.drafted[-count:], text, result)
