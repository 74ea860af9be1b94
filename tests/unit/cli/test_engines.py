"""Where workers are to be: what is refused before anything starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.cli.engines import workplace
from batchgen.cli.run_options import RunOptions
from batchgen.errors import UsageError

# The command line of an installation without the extra.
WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from batchgen.cli.main import main; main()"

REFUSED = {
    "an address without the engine": (RunOptions(ray_address="head:6379"), "--ray-address", "goes with --engine ray"),
    "devices of one machine in a cluster": (RunOptions(engine="ray", devices=("cuda:1",)), "--device", "hands out its own"),
}


@pytest.mark.parametrize(("options", "option", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused(options: RunOptions, option: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught, workplace(options):
        pass
    assert (caught.value.option, caught.value.exit_code) == (option, 2)


def test_a_cluster_s_client_address_is_refused_with_what_to_do() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="one of its own machines"), workplace(RunOptions(engine="ray", ray_address="ray://head:10001")):
        pass


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_cluster_whose_head_is_dead_is_one_message_and_exit_code_2(tmp_path: Path, by: str) -> None:
    pytest.importorskip("ray")
    (tmp_path / "list.csv").write_text("prompt\na red star\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "batchgen", "run", "list.csv", "--model", "builtin", "-o", "out", "--engine", "ray"]
    given = ["--ray-address", address] if by == "option" else []
    environment = os.environ | ({"RAY_ADDRESS": address} if by == "environment" else {})
    done = subprocess.run([*command, *given], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    name = "--ray-address" if by == "option" else "RAY_ADDRESS"
    assert done.stderr.startswith(f"error: {name}: no Ray cluster answers at {address}")
    assert "rpc_client" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_engine_is_refused_and_the_extra_named(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("prompt\na red star\n")
    command = [sys.executable, "-c", WITHOUT_RAY, "run", "list.csv", "--model", "builtin", "-o", "out", "--engine", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "batchgen[ray]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_here_the_devices_are_those_of_this_machine() -> None:
    with workplace(RunOptions(devices=("cpu",))) as found:
        assert found.platform == "cpu"
        assert (found.largest_group, found.groups) == (None, None)
