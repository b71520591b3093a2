"""From ``hspec serve TARGET ...`` to the command and environment of a vLLM server, with everything checked that can be beforehand."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hspec.drafters.head_share import can_share
from hspec.errors import HSpecError, UsageError
from hspec.serving import plugin, versions
from hspec.serving.ranks import heads_refusal
from hspec.serving.schedule import Schedule
from hspec.serving.speculation import NO_SPECULATION, speculation
from hspec.serving.targets import CACHE_TYPES, cannot_serve, model_refusal
from hspec.targets.sources import ALIASES, describe, model_folder

GIB = 1 << 30
OVERHEAD = 2 * GIB
"""What vLLM's processes take on a CPU besides weights and KV cache: SmolLM2 with 1 GiB of cache took 3.9 GB in all."""
RANK = 3 * GIB // 4
"""What each further rank takes besides: with a tiny target 0.7 GB."""

OWN = ("--speculative-config", "-sc", "--additional-config")
"""Options of vLLM that ``hspec serve`` writes itself."""

RANKS = ("--tensor-parallel-size", "-tp")
"""Options of vLLM that say over how many ranks the target's heads are spread."""

SINGLE = (
    "--pipeline-parallel-size", "-pp", "--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp",
)  # fmt: skip
"""Options of vLLM that must be 1."""

REFUSED = ("--quantization", "-q", "--kv-transfer-config")


@dataclass(frozen=True)
class Command:
    """What to run, and with which additions to the environment."""

    argv: list[str]
    environment: dict[str, str]


def plan(
    target: str, drafter: str | None, k: int | None, host: str, port: int, options: Sequence[str],
    environment: Mapping[str, str], draft: bool = True, schedule: Schedule | None = None,
) -> Command:  # fmt: skip
    """Check a request to serve, and write it as vLLM's.

    Args:
        k: drafted tokens a step; None takes the drafter's largest.
        options: further ones, of vLLM.
        environment: what is set already; it is never overruled.
        draft: False serves the target alone, with all else as it would be.
        schedule: fewer drafts where many requests run at once.

    Raises:
        UsageError: the target, the drafter, or an option cannot be served, or the port is taken.
        HSpecError: vLLM is missing or not known, or there is too little memory.
    """
    versions.require(plugin.has_native())
    given = parse_options(options)
    check_own(given)
    if draft and drafter is None:
        check_options(given)  # before anything is looked for: the plugin serves what ships
    ranks = ranks_of(given)
    name = ALIASES.get(target, target)
    config = describe(target)
    chosen = speculation(drafter, target, name, config, k, on_gpu(), ranks, schedule) if draft else NO_SPECULATION
    if chosen.by_plugin:
        check_options(given)
        check_model(name, config, ranks)
    check_port(host, port)
    model = model_folder(target)
    additions, defaults = ({}, []) if on_gpu() else cpu_defaults(given, environment, ranks)
    if not on_gpu():
        check_memory(model, {**environment, **additions}, ranks)
    argv = [
        sys.executable, "-m", "hspec.serving.launch", "serve", str(model), "--host", host, "--port", str(port),
        *([] if "--served-model-name" in given else ["--served-model-name", name]),
        *defaults, *chosen.arguments, *options,
    ]  # fmt: skip
    return Command(argv, additions)


def parse_options(options: Sequence[str]) -> dict[str, str]:
    """vLLM's options by name: ``--a b``, ``--a=b`` and ``--a`` (an empty value)."""
    given: dict[str, str] = {}
    name = None
    for word in options:
        if word.startswith("-") and not word.lstrip("-").replace(".", "").isdigit():
            name, _, value = word.partition("=")
            name = name.split(".")[0].replace("_", "-")  # --speculative-config.model is one of --speculative-config
            given[name] = value
        elif name is not None:
            given[name] = word
    return given


def ranks_of(given: Mapping[str, str]) -> int:
    """Over how many the target's heads are spread.

    Raises:
        UsageError: that is no number of ranks.
    """
    for name in RANKS:
        if name in given:
            if not given[name].isdigit() or int(given[name]) < 1:
                raise UsageError(f"{name} {given[name]}: it is a number of ranks, 1 or more")
            return int(given[name])
    return 1


def check_own(given: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: an option that is written here.
    """
    for name in OWN:
        if name in given:
            raise UsageError(
                f"{name} is written by 'hspec serve' itself: use --drafter and -k, or start vLLM as docs/serving.md shows"
            )


def check_options(given: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: an option under which the plugin cannot work with the target's pages.
    """
    for name in SINGLE:
        if name in given and given[name] != "1":
            raise UsageError(
                f"{name} {given[name]}: each rank must hold all layers and positions for the plugin; leave it out "
                f"(--tensor-parallel-size is supported), or serve with vLLM alone"
            )
    for name in REFUSED:
        if name in given:
            raise UsageError(f"{name} {given[name]} is not supported with H-Spec: leave it out, or serve with vLLM alone")
    cache = given.get("--kv-cache-dtype", "auto")
    if cache not in CACHE_TYPES:
        raise UsageError(f"--kv-cache-dtype {cache}: the plugin reads plain pages; choose one of {', '.join(CACHE_TYPES)}")


def check_model(name: str, config: Any, ranks: int) -> None:
    """
    Raises:
        UsageError: a target whose pages the plugin cannot read, or whose heads cannot be spread over so many ranks.
    """
    why = model_refusal(config)
    if why is None and not can_share(config.num_attention_heads, config.num_key_value_heads, ranks):
        raise UsageError(f"{name} has {heads_refusal(config.num_attention_heads, config.num_key_value_heads, ranks)}")
    if why is not None:
        raise UsageError(cannot_serve(name, why))


def check_port(host: str, port: int) -> None:
    """
    Raises:
        UsageError: something listens there already, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port, or stop what is there"
        ) from error


# -- without a GPU -----------------------------------------------------------------------------------------------


def on_gpu() -> bool:
    return torch.cuda.is_available()


def cpu_defaults(given: Mapping[str, str], environment: Mapping[str, str], ranks: int) -> tuple[dict[str, str], list[str]]:
    """Settings that vLLM's CPU backend needs here, where the user does not say otherwise: environment and options.

    In bf16 and compiled, its defaults, version 0.32.0 is slower by far on processors without bf16 units, and its text was wrong.
    """
    additions = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}  # it keeps a core to itself otherwise
    if "--kv-cache-memory-bytes" not in given and "--gpu-memory-utilization" not in given:
        additions["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(4, available_memory() // (4 * ranks * GIB))))  # of each rank
    if ranks > 1 and memory_nodes() < ranks:
        # vLLM gives each rank a node of its own, and refuses to start where there are fewer.
        additions["VLLM_CPU_OMP_THREADS_BIND"] = bindings(os.sched_getaffinity(0), ranks)
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # vLLM recommends it, the more so with speculation
        additions["LD_PRELOAD"] = str(openmp)
    options = [] if "--dtype" in given else ["--dtype", "float32"]
    options += [] if {"--enforce-eager", "--no-enforce-eager"} & set(given) else ["--enforce-eager"]
    return {name: value for name, value in additions.items() if name not in environment}, options


def memory_nodes() -> int:
    """NUMA nodes of this machine."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def bindings(cores: Collection[int], ranks: int) -> str:
    """Cores shared out among ranks, as ``VLLM_CPU_OMP_THREADS_BIND`` has them; ranks share cores where there are fewer of these."""
    ordered = sorted(cores)
    each = max(1, len(ordered) // ranks)
    shares = [[ordered[(rank * each + i) % len(ordered)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def check_memory(model: Path | str, environment: Mapping[str, str], ranks: int) -> None:
    """
    Raises:
        HSpecError: weights, KV cache and vLLM itself need more than there is.
    """
    cache = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not cache.isdigit() or not isinstance(model, Path):
        return  # vLLM works it out, and says so itself
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    need = 2 * weights + ranks * int(cache) * GIB + OVERHEAD + (ranks - 1) * RANK  # the linear layers are packed once more
    there = available_memory()
    if need > there:
        raise HSpecError(
            f"serving {model.name} takes about {need / GIB:.1f} GiB ({ranks * int(cache)} of them KV cache), and "
            f"{there / GIB:.1f} are free: close something, or set VLLM_CPU_KVCACHE_SPACE to fewer GiB"
        )


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
