"""What the frozen target leaves of a batch of documents, run anew for every batch or kept from the first time.

A drafter needs of every token the tapped hidden states, the K/V of the layers it reads and the final hidden state. Kept in half
precision that is some kilobytes a token, so it is worth it where documents are seen more than once; how much it will be is
known beforehand, and what does not fit is refused. Trainings of several drafters on the same documents may share them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.errors import HSpecError
from hspec.files import reason
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from hspec.training.corpus import Corpus, Example
from hspec.training.examples import Batch

SHARE_OF_FREE = 0.8
"""Of what is free on the disk, as much may be taken."""


@dataclass(frozen=True)
class Features:
    """Of B documents of T tokens, padding included."""

    taps: Tensor
    """``[B, T, F, hidden]``."""
    hidden: Tensor
    """After the target's final norm, ``[B, T, hidden]``."""
    kv: KVView
    """Post-RoPE K/V ``[B, kv_heads, T, head_dim]`` of the layers that the drafter reads; others may be empty."""


@dataclass(frozen=True)
class Needs:
    """What a drafter is trained on of the target, beside the final hidden state."""

    taps: tuple[int, ...]
    kv_layers: tuple[int, ...]
    """Whose K/V are read; ascending, each once."""

    @staticmethod
    def of(config: DrafterConfig) -> Needs:
        reads = isinstance(config, ParallelConfig) and config.attention is not None and config.attention.context == "target"
        layers = sorted(set(config.kv_layers)) if reads and isinstance(config, ParallelConfig) else []
        return Needs(tuple(config.taps), tuple(layers))

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        taps, layers = {*self.taps, *other.taps}, {*self.kv_layers, *other.kv_layers}
        return Needs(tuple(sorted(taps)), tuple(sorted(layers)))


class FeatureSource:
    """Runs the target for every batch, and keeps nothing."""

    def __init__(self, target: Target, config: DrafterConfig):
        self.target, self.needs = target, Needs.of(config)
        target.read_kv(self.needs.kv_layers)

    def __call__(self, batch: Batch) -> Features:
        """Features of a batch, on the target's device."""
        return self._run(batch, self.needs)

    def expect(self, batch: Batch) -> None:
        """Say which batch will be asked for soon: where the target's layers run elsewhere, they begin with it."""
        self.target.expect(batch.tokens, list(self.needs.taps))

    def _run(self, batch: Batch, needs: Needs) -> Features:
        tokens = batch.tokens.to(self.target.device)
        B, T = tokens.shape
        cache = self.target.new_cache(B, T)
        output = self.target.forward(tokens, cache, list(needs.taps))
        cache.advance([T] * B)
        return Features(output.taps, output.hidden, cache.view())


class KeptFeatures(FeatureSource):
    """Runs the target over a document once, and keeps what it leaves in fp16.

    A hidden state is kept as its direction and its RMS, so that no residual stream is too large for fp16.

    Args:
        examples: all documents there will be, as the stream has them.
        file: keep them there, and find them again in the next run; None keeps them in memory.
        others: what else is to be kept, for other drafters that share the file. Several processes may fill it: whoever runs the target
            over a document writes the same numbers.

    Raises:
        HSpecError: they would not fit on the disk.
    """

    def __init__(
        self, target: Target, config: DrafterConfig, examples: Sequence[Example], file: Path | None, others: Needs | None = None
    ):
        super().__init__(target, config)
        corpus = Corpus.of(examples)
        self._kept = self.needs if others is None else self.needs | others
        target.read_kv(self._kept.kv_layers)
        self._starts = np.concatenate(([0], np.cumsum(corpus.lengths))).tolist()
        self._columns = self._laid_out()
        width, scales = max(columns.stop for columns in self._columns.values()), len(self._kept.taps) + 1
        self._store = _Store(self._starts[-1], width, scales, len(corpus), file, self._key(corpus))

    def _laid_out(self) -> dict[str, slice]:
        """Where in a token's row each part is."""
        hidden, shape = self.target.hidden_size, self.target.cache_shape
        widths = {f"tap {layer}": hidden for layer in self._kept.taps} | {"hidden": hidden}
        widths |= {f"{kind} {layer}": shape.kv_heads * shape.head_dim for layer in self._kept.kv_layers for kind in "kv"}
        ends = np.cumsum(list(widths.values())).tolist()
        return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}

    def _key(self, corpus: Corpus) -> bytes:
        """What decides the content of a file."""
        what = f"{self.target.weight_hash()} {self._kept} {corpus.fingerprint()}"
        return hashlib.sha256(what.encode()).digest()

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def __call__(self, batch: Batch) -> Features:
        self.fill(batch)
        return self._assembled(batch)

    def fill(self, batch: Batch) -> None:
        """Run the target over those documents of a batch that it has not seen yet."""
        for row, document in enumerate(batch.documents):
            if not self._store.filled[document]:
                self._fill(document, batch.tokens[row])

    def expect(self, batch: Batch) -> None:
        for row, document in enumerate(batch.documents):
            if not self._store.filled[document]:
                self.target.expect(self._alone(document, batch.tokens[row]).tokens, list(self._kept.taps))

    def _alone(self, document: int, tokens: Tensor) -> Batch:
        """A batch of one document, whose tokens may be padded: among others, products in bf16 may round otherwise, and a resumed run would
        have other values than the undisturbed one, whose batches brought the document first in other company."""
        return Batch(tokens[None, : self._starts[document + 1] - self._starts[document]], torch.empty(0))

    def _fill(self, document: int, tokens: Tensor) -> None:
        """Run the target over a document."""
        span = slice(self._starts[document], self._starts[document + 1])
        features = self._run(self._alone(document, tokens), self._kept)
        streams = torch.cat((features.taps[0], features.hidden[0, :, None]), dim=1).float()  # [n, F + 1, hidden]
        scale = streams.square().mean(-1).sqrt().clamp_min(1e-6)
        parts = [(streams / scale[..., None]).flatten(1)]
        for layer in self._kept.kv_layers:
            parts += [t[0].transpose(0, 1).flatten(1).float() for t in features.kv.layer(layer)]
        self._store.values[span] = torch.cat(parts, dim=1).half().cpu().numpy()
        self._store.scales[span] = scale.cpu().numpy()
        self._store.filled[document] = True

    def _assembled(self, batch: Batch) -> Features:
        """Everything comes from the store, also the first time: what is seen of a document never changes."""
        streams = [f"tap {layer}" for layer in self.needs.taps] + ["hidden"]
        columns = [self._scales_of(name) for name in streams]
        scales = self._padded(self._store.scales, batch)[:, :, columns, None]
        taps = torch.stack([self._part(name, batch) for name in streams], dim=2) * scales  # [B, T, F + 1, hidden]
        kv = KVView(*self._by_layer(batch), lengths=(batch.tokens.shape[1],) * len(batch.documents))
        return Features(taps[:, :, :-1], taps[:, :, -1], kv)

    def _scales_of(self, name: str) -> int:
        """The column of a stream's RMS."""
        return len(self._kept.taps) if name == "hidden" else self._kept.taps.index(int(name.split()[1]))

    def _part(self, name: str, batch: Batch) -> Tensor:
        return self._padded(self._store.values[:, self._columns[name]], batch)

    def _padded(self, stored: np.ndarray, batch: Batch) -> Tensor:
        """Of a batch's documents ``[B, T, ...]`` fp32, zeros where they are padded."""
        out = torch.zeros(*batch.tokens.shape, stored.shape[1])
        for row, document in enumerate(batch.documents):
            first, end = self._starts[document], self._starts[document + 1]
            out[row, : end - first] = torch.from_numpy(np.array(stored[first:end]))
        return out.to(self.target.device)

    def _by_layer(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        shape = self.target.cache_shape
        nothing = torch.empty(batch.tokens.shape[0], shape.kv_heads, 0, shape.head_dim)
        sides = []
        for kind in "kv":
            layers = [nothing] * shape.layers
            for layer in self.needs.kv_layers:
                layers[layer] = self._part(f"{kind} {layer}", batch).unflatten(-1, (shape.kv_heads, -1)).transpose(1, 2)
            sides.append(layers)
        return sides[0], sides[1]


class _Store:
    """Rows of fp16 values and fp32 scales for every token, and which documents are there; in memory or in a file."""

    def __init__(self, tokens: int, width: int, scales: int, documents: int, file: Path | None, key: bytes):
        self.nbytes = tokens * (2 * width + 4 * scales) + documents + len(key)
        buffer = np.zeros(self.nbytes, dtype=np.uint8) if file is None else _mapped(file, self.nbytes, key)
        filled, scale_bytes = len(key) + documents, tokens * 4 * scales
        # Offsets into a byte buffer need not be aligned; numpy copes.
        self.filled = buffer[len(key) : filled].view(bool)
        self.scales = buffer[filled : filled + scale_bytes].view(np.float32).reshape(tokens, scales)
        self.values = buffer[filled + scale_bytes :].view(np.float16).reshape(tokens, width)


def _mapped(file: Path, size: int, key: bytes) -> np.ndarray:
    """A file of the size; zeros if it is new or of other documents."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size == size:
            buffer = np.memmap(file, dtype=np.uint8, mode="r+")
            if bytes(buffer[: len(key)]) == key:
                return buffer
            del buffer
        file.unlink(missing_ok=True)
        free = shutil.disk_usage(file.parent).free
        if size > SHARE_OF_FREE * free:
            raise HSpecError(
                f"the target's features would take {size / 1e9:.1f} GB, only {free / 1e9:.1f} GB are free at {file.parent}: train with "
                f"features: stream, or on fewer documents"
            )
        buffer = np.memmap(file, dtype=np.uint8, mode="w+", shape=(size,))
        buffer[: len(key)] = np.frombuffer(key, dtype=np.uint8)
        return buffer
    except OSError as error:
        raise HSpecError(f"cannot keep features in {file}: {reason(error)}: train with features: stream") from error


def feature_bytes(config: DrafterConfig) -> int:
    """What one token takes when it is kept."""
    streams = (len(config.taps) + 1) * (2 * config.hidden_size + 4)
    if not isinstance(config, ParallelConfig) or config.attention is None:
        return streams
    return streams + len(Needs.of(config).kv_layers) * 4 * config.attention.kv_heads * config.attention.head_dim
