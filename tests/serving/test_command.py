"""What ``hspec serve`` checks before anything is loaded, and the command that it makes."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.serving import command, versions


@pytest.fixture(autouse=True)
def known_vllm(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setattr(command.plugin, "has_native", lambda: False)
    monkeypatch.setattr(command, "on_gpu", lambda: False)


def test_options_of_vllm():
    words = ["--max-model-len", "4096", "--dtype=bfloat16", "--enforce_eager", "-tp", "2", "--seed", "-1"]
    given = {"--max-model-len": "4096", "--dtype": "bfloat16", "--enforce-eager": "", "-tp": "2", "--seed": "-1"}
    assert command.parse_options(words) == given


@pytest.mark.parametrize(
    "words, why",
    [
        (["--speculative-config", "{}"], "--speculative-config is written by 'hspec serve' itself"),
        (["--additional-config={}"], "--additional-config is written"),
        (["--speculative_config.model", "x"], "--speculative-config is written"),
        (["--tensor-parallel-size", "two"], "--tensor-parallel-size two: it is a number of ranks, 1 or more"),
        (["-tp=0"], "-tp 0: it is a number of ranks"),
        (["-pp=4"], "-pp 4: each rank must hold all layers and positions"),
        (["-dcp", "2"], "-dcp 2: each rank must hold"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: the plugin reads plain pages"),
        (["--quantization", "awq"], "--quantization awq is not supported"),
    ],
)
def test_unsupported_options_are_refused(words, why):
    with pytest.raises(UsageError, match=why):
        command.plan("no-such-target", None, None, "127.0.0.1", 8000, words, {})  # before the target is looked for


def test_what_is_no_refusal():
    given = {"--tensor-parallel-size": "2", "--pipeline-parallel-size": "1", "--kv-cache-dtype": "auto", "--max-num-seqs": "4"}
    command.check_options(given)
    assert command.ranks_of(given) == 2 and command.ranks_of({}) == 1


@pytest.mark.parametrize(
    "cores, ranks, bound", [((0, 1, 2, 3), 2, "0,1|2,3"), ((4, 7, 5), 2, "4|5"), ((1,), 2, "1|1"), ((0, 1), 3, "0|1|0")]
)
def test_cores_of_ranks(cores, ranks, bound):
    assert command.bindings(cores, ranks) == bound


def test_ranks_on_a_cpu(monkeypatch):
    monkeypatch.setattr(command, "available_memory", lambda: 12 * command.GIB)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(command, "memory_nodes", lambda: 1)
    additions, _ = command.cpu_defaults({}, {}, 2)
    assert additions["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3" and additions["VLLM_CPU_KVCACHE_SPACE"] == "1"  # of each rank
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.cpu_defaults({}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 2)[0]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.cpu_defaults({}, {}, 1)[0]
    monkeypatch.setattr(command, "memory_nodes", lambda: 2)  # vLLM binds a rank to each
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.cpu_defaults({}, {}, 2)[0]


def test_a_target_that_cannot_be_spread():
    heads = SimpleNamespace(model_type="llama", num_attention_heads=9, num_key_value_heads=3)
    command.check_model("org/model", heads, 3)
    with pytest.raises(
        UsageError, match=r"org/model has 9 query heads and 3 KV heads, which 2 ranks cannot share: .*allow 1, 3 or 9\)$"
    ):
        command.check_model("org/model", heads, 2)


def test_a_taken_port_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port} .*in use"):
            command.check_port("127.0.0.1", port)
    command.check_port("127.0.0.1", port)


def test_an_address_of_elsewhere_is_refused():
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        command.check_port("192.0.2.1", 8000)


def test_too_little_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(command, "available_memory", lambda: 3 * command.GIB)
    with pytest.raises(HSpecError, match=r"takes about 4\.0 GiB \(2 of them KV cache\), and 3\.0 are free"):
        command.check_memory(tmp_path, {"VLLM_CPU_KVCACHE_SPACE": "2"}, 1)
    with pytest.raises(HSpecError, match=r"takes about 6\.8 GiB \(4 of them KV cache\), and 3\.0 are free"):
        command.check_memory(tmp_path, {"VLLM_CPU_KVCACHE_SPACE": "2"}, 2)
    command.check_memory(tmp_path, {"VLLM_CPU_KVCACHE_SPACE": "0"}, 1)


def test_defaults_on_a_cpu_give_way_to_what_is_set(monkeypatch):
    monkeypatch.setattr(command, "available_memory", lambda: 12 * command.GIB)
    additions, options = command.cpu_defaults({}, {}, 1)
    assert additions["VLLM_CPU_KVCACHE_SPACE"] == "3" and options == ["--dtype", "float32", "--enforce-eager"]
    additions, options = command.cpu_defaults(
        {"--dtype": "bfloat16", "--no-enforce-eager": ""}, {"VLLM_CPU_KVCACHE_SPACE": "1"}, 1
    )
    assert "VLLM_CPU_KVCACHE_SPACE" not in additions and options == []


def test_no_drafter_ships_for_another_target(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "describe", lambda _: type("Config", (), {"model_type": "llama"})())
    with pytest.raises(UsageError, match="no drafter ships for 'org/model'"):
        command.plan("org/model", None, None, "127.0.0.1", 8000, [], {})


@pytest.mark.real
def test_the_command_for_the_packaged_model(tmp_path):
    made = command.plan("smollm2", None, None, "127.0.0.1", 0, ["--max-model-len", "2048"], {"VLLM_CPU_KVCACHE_SPACE": "1"})
    argv = made.argv
    assert argv[1:4] == ["-m", "hspec.serving.launch", "serve"]
    assert json.loads(argv[argv.index("--speculative-config") + 1])["num_speculative_tokens"] == 4
    assert "smollm2-135m" in json.loads(argv[argv.index("--additional-config") + 1])["hspec_drafter"]
    assert argv[-2:] == ["--max-model-len", "2048"]
    with pytest.raises(UsageError, match="trained for 1 to 4"):
        command.plan("smollm2", None, 9, "127.0.0.1", 0, [], {})
