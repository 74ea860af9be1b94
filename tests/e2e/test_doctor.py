"""`batchgen doctor` on machines that differ: no GPU, a stubbed one, a full disk, no network. A token is seen and never shown."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commandline import Said, batchgen, environment
from test_disk_full import can_mount

TESTS = Path(__file__).parents[1]
TOKEN = "hf_" + "Zq7" * 11
NO_PROXY = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "")
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "CUDA_VISIBLE_DEVICES": "", **NO_PROXY}  # nobody listens on port 9

# The command on a machine with two cards, by a driver that answers as NVML does. All but the driver is this machine's.
WITH_CARDS = """
import sys
from batchgen.inventory import device
from test_device import BIG, Nvml, SMALL
class Driver(Nvml):
    def nvmlSystemGetDriverVersion(self): return b"570.86.15"
    def nvmlSystemGetCudaDriverVersion(self): return 12080
device._DRIVER_MARKS = ("/",)
sys.modules["pynvml"] = Driver([BIG, SMALL])
from batchgen.cli.main import main
main(sys.argv[1:])
"""


def lines_of(said: Said) -> dict[str, dict[str, str]]:
    assert "Traceback" not in said.err, said
    assert TOKEN not in said.out + said.err
    found = json.loads(said.out)
    return {line["name"]: line for line in found["checks"]}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", **ONLINE}


def test_no_gpu_and_no_network_are_warnings_and_a_token_in_the_environment_is_not_shown(tmp_path, home):
    said = batchgen("doctor", "--json", folder=tmp_path, env=home | {"HF_TOKEN": TOKEN})
    assert said.code == 0, said
    lines = lines_of(said)
    assert (lines["devices"]["status"], lines["model hub"]["status"], lines["hub token"]["text"]) == ("warning", "warning", "present")
    assert "no GPU" in lines["devices"]["text"]
    assert "does not answer" in lines["model hub"]["text"]
    assert not (tmp_path / "results").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".batchgen")] == []


def test_a_token_in_a_file_and_a_password_in_an_address_are_not_shown_in_the_table_either(tmp_path, home):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN)
    said = batchgen("doctor", folder=tmp_path, env=home | {
        "HF_ENDPOINT": "http://someone:open-sesame@127.0.0.1:9", "https_proxy": "http://me:open-sesame@127.0.0.1:9", "COLUMNS": "80",
    })
    assert said.code == 0, said
    assert TOKEN not in said.out + said.err
    assert "open-sesame" not in said.out + said.err
    assert "present" in said.out
    assert "Traceback" not in said.err
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_hub_that_answers_is_asked_without_the_token(tmp_path, home):
    asked: list[dict[str, str]] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(dict(self.headers))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        said = batchgen("doctor", "--json", folder=tmp_path, env=home | {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN})
        server.shutdown()
    assert lines_of(said)["model hub"] == {"name": "model hub", "status": "ok", "text": "answers", "fix": ""}
    assert len(asked) == 1
    assert TOKEN not in str(asked)


def test_cards_and_driver_are_named_and_a_torch_that_cannot_use_them_fails(tmp_path, home):
    paths = os.pathsep.join([str(TESTS / "unit" / "inventory"), str(TESTS)])
    env = environment(home | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"})
    env.pop("CUDA_VISIBLE_DEVICES")
    ran = subprocess.run(
        [sys.executable, "-c", WITH_CARDS, "doctor", "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )
    lines = lines_of(Said(ran.returncode, ran.stdout, ran.stderr))
    assert lines["cuda:0"]["text"] == "NVIDIA H100 80GB HBM3: 79.00 GiB free of 80.00 GiB"
    assert lines["cuda:1"]["status"] == "ok"
    assert lines["driver"]["text"] == "NVIDIA 570.86.15, for CUDA up to 12.8"
    works = lines["torch on cuda"]
    # a machine that has real cards beside the stubbed driver can use them
    assert (ran.returncode, works["status"]) in ((1, "failure"), (0, "ok"))
    assert works["fix"] == ("" if works["status"] == "ok" else "install a torch build with CUDA for this driver")
    assert "offline" in lines["model hub"]["text"].lower()


@pytest.mark.skipif(not can_mount(), reason="no mount namespaces here: tests/unit/doctor has full disks by their numbers")
def test_a_full_disk_fails_with_what_to_do(tmp_path, home):
    (tmp_path / "small").mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -m batchgen doctor -o "$1/out" --json'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path / "small"), sys.executable], cwd=tmp_path, env=environment(home),
        capture_output=True, text=True, check=False,
    )
    assert ran.returncode == 1, ran.stderr
    lines = lines_of(Said(ran.returncode, ran.stdout, ran.stderr))
    assert lines["output disk"]["status"] == "failure"
    assert lines["output disk"]["fix"] == "make room or choose another folder"
    assert (lines["output folder"]["status"], lines["output folder"]["fix"]) == ("failure", "choose another folder with -o")
    assert "No space left" in lines["output folder"]["text"]
