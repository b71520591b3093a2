"""``hspec serve-features``: a target's layers run here, for trainers elsewhere."""

from __future__ import annotations

import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hspec.cli.app import app
from hspec.cli.options import DEFAULT_TARGET, DeviceOption, DtypeOption, ThreadsOption, check_device, prefer_large_pages
from hspec.errors import UsageError


@app.command()
def serve_features(
    target: Annotated[str, typer.Argument(help="smollm2 (packaged), a folder, a .gguf file or a hub id.")] = DEFAULT_TARGET,
    listen: Annotated[
        str,
        typer.Option(
            help="host:port (port 0: any that is free), or unix:PATH. Whoever reaches it may ask: there is no password."
        ),
    ] = "127.0.0.1:7700",
    precision: Annotated[str, typer.Option(help="As the run's: fp32, or bf16 products.")] = "fp32",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
) -> None:
    """Run a target's layers for trainings elsewhere ('hspec train --feature-server HOST:PORT'). Ctrl-C ends it.

    Examples:  hspec serve-features smollm2   |   hspec serve-features ./my-target --device cuda --precision bf16 --listen 0.0.0.0:7700
    """
    prefer_large_pages()
    import torch

    from hspec.remote.address import Address
    from hspec.remote.facts import FEATURE_DTYPES, LINEARS_OF
    from hspec.remote.server import FeatureServer
    from hspec.targets.packing import has_bf16_products
    from hspec.targets.sources import load_target

    address = Address.parse(listen)
    if dtype not in FEATURE_DTYPES:
        raise UsageError(f"--dtype {dtype}: choose one of {', '.join(FEATURE_DTYPES)}")
    if precision not in LINEARS_OF or (precision == "bf16" and dtype != "float32"):
        raise UsageError(f"--precision {precision}: choose fp32, or bf16 products of a float32 target (--dtype float32)")
    if threads:
        torch.set_num_threads(threads)
    check_device(device)
    if precision == "bf16" and not has_bf16_products(torch.device(device)):
        raise UsageError("--precision bf16 needs hardware with bf16 products (AVX512-BF16, AMX or a recent GPU): use fp32")
    console = Console(highlight=False)
    loaded = load_target(target, device, getattr(torch, dtype), LINEARS_OF[precision])
    server = FeatureServer(loaded, address, precision, lambda line: console.print(f"[dim]{escape(line)}[/dim]"))
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: server.stop())
    how = f"{dtype}, {precision} products" if dtype == "float32" else dtype
    console.print(f"features of {escape(loaded.name)} ({loaded.weight_hash()}; {how}) at {server.address}; Ctrl-C ends it")
    server.run()
