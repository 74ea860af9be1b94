"""Hub ids: resolved once to a commit, from the cache alone when offline, and fetching only what a run needs.

Offline tests use a cache laid out as huggingface_hub lays it out; the others speak to a small hub on this machine through the
real client, in a process of their own (the client reads its settings when it is imported).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from stub_models import INDEX, write_json, write_model, write_weights

MODEL = "Qwen/Qwen-Image"
OLD, NEW = "a" * 40, "b" * 40

ASK = """
import json, sys
from batchgen.errors import BatchgenError
from batchgen.inventory.model import ModelOptions, resolve
seen = []
try:
    options = ModelOptions(**json.loads(sys.argv[2]))
    facts = resolve(sys.argv[1], options, platform="cuda", on_progress=lambda done, total: seen.append([done, total]))
    print(json.dumps({"revision": facts.revision, "folder": facts.folder, "notes": facts.notes, "kind": facts.kind, "seen": seen,
        "bytes": dict(facts.component_bytes)}))
except BatchgenError as error:
    print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


def ask(model: str, environment: dict[str, str], **options: Any) -> dict[str, Any]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))} | environment
    done = subprocess.run([sys.executable, "-c", ASK, model, json.dumps(options)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["stderr"] = done.stderr
    return answer


def put(cache: Path, commit: str, *, weights: bool = True, main: bool = False, dtype: str = "bfloat16") -> Path:
    repository = cache / "models--Qwen--Qwen-Image"
    folder = write_model(repository / "snapshots" / commit, weights=weights, dtype=dtype)
    if main:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    put(tmp_path / "cache", OLD)
    put(tmp_path / "cache", NEW, main=True, dtype="float32")
    return tmp_path / "cache"


def offline(cache: Path, **options: Any) -> dict[str, Any]:
    return ask(options.pop("model", MODEL), {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}, **options)


def test_offline_the_cache_gives_the_newest_commit(cache: Path) -> None:
    answer = offline(cache)
    assert (answer["revision"], answer["kind"]) == (NEW, "hub")
    assert answer["folder"] == str(cache / "models--Qwen--Qwen-Image" / "snapshots" / NEW)
    assert answer["notes"] == [f"HF_HUB_OFFLINE is set: {MODEL} is taken from the cache at commit {NEW[:12]}"]


def test_a_commit_asked_for_is_used_though_the_cache_holds_a_newer_one(cache: Path) -> None:
    assert offline(cache, revision=OLD)["revision"] == OLD


def test_a_cache_named_by_option_is_used(cache: Path, tmp_path: Path) -> None:
    assert offline(tmp_path / "elsewhere", cache_dir=str(cache))["revision"] == NEW


OFFLINE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a model that was never fetched": ({"model": "some/one"}, "some/one is not in the cache, and HF_HUB_OFFLINE is set"),
    "a commit that is not there": ({"revision": "c" * 40}, f"{MODEL} at revision '{'c' * 40}' is not in the cache"),
}


@pytest.mark.parametrize(("options", "said"), OFFLINE_FAULTS.values(), ids=OFFLINE_FAULTS.keys())
def test_what_the_cache_lacks_is_said(cache: Path, options: dict[str, Any], said: str) -> None:
    answer = offline(cache, **options)
    assert said in answer["error"]
    assert answer["code"] == 2


def test_an_incomplete_cache_names_the_part_and_the_way_out(tmp_path: Path) -> None:
    put(tmp_path, NEW, main=True)
    (tmp_path / "models--Qwen--Qwen-Image" / "snapshots" / NEW / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    error = offline(tmp_path)["error"]
    assert "vae: its folder has no weights" in error
    assert "run once with a connection" in error


class Hub:
    """A hub of one model, with what the client asks of the real one: model info, HEAD and GET of files, byte ranges."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = NEW
        self.status: int | None = None
        self.code: str | None = None
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.claimed_sizes: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, *, head: bool) -> None:
                hub.tokens.append(self.headers.get("authorization", ""))
                path = self.path.partition("?")[0]
                if hub.status is not None:
                    self.reply(hub.status, b"{}", {"X-Error-Code": hub.code or ""}, head)
                elif path.startswith(f"/api/models/{MODEL}"):
                    self.reply(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, head)
                elif path.startswith(f"/{MODEL}/resolve/"):
                    self.file("/".join(path.split("/")[5:]), head)
                else:
                    self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, head)

            def file(self, name: str, head: bool) -> None:
                path = hub.folder / name
                if not path.is_file():
                    self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit}, head)
                    return
                content = path.read_bytes()
                fields = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
                if not head:
                    hub.asked.append(name)
                if (span := self.headers.get("range")) and not head:
                    first, _, last = span.removeprefix("bytes=").partition("-")
                    part = content[int(first) : int(last or len(content)) + 1]
                    end = int(first) + len(part) - 1
                    self.reply(206, part, fields | {"Content-Range": f"bytes {first}-{end}/{len(content)}"}, head)
                else:
                    self.reply(200, content, fields, head)

            def reply(self, status: int, body: bytes, fields: dict[str, str], head: bool) -> None:
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not head:
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def info(self) -> dict[str, Any]:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}
        siblings = [{"rfilename": name, "size": self.claimed_sizes.get(name, size), "blobId": name} for name, size in names.items()]
        return {"id": MODEL, "modelId": MODEL, "sha": self.commit, "siblings": siblings, "tags": [], "downloads": 0, "private": False}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_model(tmp_path / "hub")
    for name in (
        "text_encoder/pytorch_model.bin",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "vae/model.onnx",
        "big_checkpoint.safetensors",
    ):
        (folder / name).write_bytes(b"x" * 1000)
    write_json(folder / "assets" / "sample.json", {})
    served = Hub(folder)
    yield served
    served.server.shutdown()
    served.server.server_close()


def online(hub: Hub, tmp_path: Path, model: str = MODEL, token: str | None = None, **options: Any) -> dict[str, Any]:
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "*",
    }
    return ask(model, environment | ({"HF_TOKEN": token} if token else {}), **options)


NEEDED = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]


def test_a_download_fetches_each_needed_file_once_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    answer = online(hub, tmp_path)
    assert answer["revision"] == NEW
    assert answer["bytes"] == {"text_encoder": 12, "transformer": 16, "vae": 8}
    assert sorted(hub.asked) == NEEDED
    weights = sum((hub.folder / name).stat().st_size for name in NEEDED if name.endswith(".safetensors"))
    assert answer["seen"][-1] == [weights, weights]
    assert [done for done, _ in answer["seen"]] == sorted(done for done, _ in answer["seen"])


def test_a_second_run_fetches_nothing_and_offline_it_finds_all(hub: Hub, tmp_path: Path) -> None:
    online(hub, tmp_path)
    hub.asked.clear()
    assert online(hub, tmp_path)["revision"] == NEW
    assert hub.asked == []
    assert offline(tmp_path / "cache")["revision"] == NEW


def test_an_interrupted_download_goes_on_with_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    folder = Path(online(hub, tmp_path)["folder"])
    hub.asked.clear()
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert online(hub, tmp_path)["bytes"]["vae"] == 8
    assert set(hub.asked) <= {"vae/diffusion_pytorch_model.safetensors"}


def test_a_resume_with_the_old_commit_keeps_it_though_the_hub_has_moved(hub: Hub, tmp_path: Path) -> None:
    online(hub, tmp_path)
    hub.commit = "d" * 40
    write_weights(hub.folder / "vae" / "diffusion_pytorch_model.safetensors", {"c": ("bfloat16", [40])})
    assert online(hub, tmp_path)["bytes"]["vae"] == 80
    assert online(hub, tmp_path, revision=NEW)["bytes"]["vae"] == 8


def test_a_variant_is_fetched_instead_of_the_plain_files(hub: Hub, tmp_path: Path) -> None:
    shutil.copy(hub.folder / "vae" / "diffusion_pytorch_model.safetensors", hub.folder / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    online(hub, tmp_path, variant="fp16")
    assert "vae/diffusion_pytorch_model.fp16.safetensors" in hub.asked
    assert "vae/diffusion_pytorch_model.safetensors" not in hub.asked


def test_a_plan_reads_headers_and_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    answer = online(hub, tmp_path, download=False)
    assert answer["bytes"] == {"text_encoder": 12, "transformer": 16, "vae": 8}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_download_larger_than_the_disk_is_refused_with_both_sizes(hub: Hub, tmp_path: Path) -> None:
    hub.claimed_sizes = {"transformer/diffusion_pytorch_model.safetensors": 2**60}
    error = online(hub, tmp_path)["error"]
    assert "1048576.00 TiB in 3 file(s) are to be downloaded, but only" in error
    assert not [name for name in hub.asked if name.endswith(".safetensors")]


STATUSES: dict[str, tuple[int, str, str]] = {
    "no such model": (404, "RepoNotFound", f"there is no model '{MODEL}' on the hub"),
    "a gated model": (403, "GatedRepo", f"{MODEL} is gated"),
    "no such revision": (404, "RevisionNotFound", f"{MODEL} has no revision 'v9'"),
    "no index": (404, "EntryNotFound", "it has no model_index.json"),
}


@pytest.mark.parametrize(("status", "code", "said"), STATUSES.values(), ids=STATUSES.keys())
def test_what_the_hub_refuses_is_said_and_the_token_is_not(hub: Hub, tmp_path: Path, status: int, code: str, said: str) -> None:
    hub.status, hub.code = status, code
    answer = online(hub, tmp_path, revision="v9", token="hf_secretsecretsecret")
    assert said in answer["error"]
    assert any("hf_secretsecretsecret" in token for token in hub.tokens)
    assert "hf_secret" not in json.dumps(answer)


def test_a_hub_out_of_reach_leaves_the_cache(hub: Hub, tmp_path: Path) -> None:
    online(hub, tmp_path)
    hub.server.shutdown()
    hub.server.server_close()
    answer = online(hub, tmp_path)
    assert answer["revision"] == NEW
    assert "cannot be reached" in answer["notes"][0]
    assert "cannot be reached" in online(hub, tmp_path, model="some/one")["error"]


def test_an_index_without_consent_stops_before_any_other_file(hub: Hub, tmp_path: Path) -> None:
    write_json(hub.folder / "model_index.json", INDEX | {"vae": ["mine", "OwnVAE"]})
    assert "--trust-remote-code" in online(hub, tmp_path)["error"]
    assert hub.asked == ["model_index.json"]
