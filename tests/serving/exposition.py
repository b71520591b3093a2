"""What a vLLM server says at ``/metrics``, as far as it is read, and a small server that says it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def exposition(
    running: int = 0, usage: float = 0.0, preemptions: int = 0, drafts: int | None = None, accepted: tuple[int, ...] = (),
    engine: str = "0", blocks: str = "64", tokens: str = "None",
) -> str:  # fmt: skip
    """In the words of vLLM 0.32, with something of what is not read."""
    labels = f'engine="{engine}",model_name="a"'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {float(running)}",
        f"vllm:num_requests_waiting{{{labels}}} 1.0",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        "# TYPE vllm:num_preemptions_total counter",
        f"vllm:num_preemptions_total{{{labels}}} {float(preemptions)}",
        f"vllm:num_preemptions_created{{{labels}}} 1.7e+09",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="{blocks}",'
        f'kv_cache_size_tokens="{tokens}",enable_prefix_caching="True"}} 1.0',
        "# TYPE python_info gauge",
        'python_info{implementation="CPython"} 1.0',
    ]
    if drafts is not None:
        lines += ["# TYPE vllm:spec_decode_num_drafts_total counter", f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}"]
        lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {count}'
            for i, count in enumerate(accepted)
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def metrics_server(say: Callable[[], str]) -> Iterator[str]:
    """Gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = say().encode() if self.path == "/metrics" else b"no such page"
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
