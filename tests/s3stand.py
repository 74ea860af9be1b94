"""A stand-in for S3 on this machine: moto behind a server thread, with failures on order. For the tests of outputs in a store."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import boto3
from moto.core.models import botocore_stubber
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET = "stand-in-key", "stand-in-SECRET-word"


@dataclass
class StandIn:
    """What the tests see of it. `fail`: how many more uploads below outputs/ are turned away with 503, and counted in `failed`."""

    url: str
    bucket: str
    fail: int = 0
    failed: int = 0
    puts: list[str] = field(default_factory=list)  # object names of uploads that came through
    conditions: str = "kept"  # of conditional uploads: "kept", "ignored" or answered with "501", as by stores that do not know them
    gate: Callable[[str], None] = lambda name: None  # called before each upload that is let through

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1",
        )

    def objects(self, prefix: str = "") -> dict[str, int]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def read(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return body


class _Silent(WSGIRequestHandler):
    def log(self, kind: str, message: str, *args: Any) -> None: ...


@contextmanager
def stand_in(bucket: str = "night") -> Iterator[StandIn]:
    """Runs until left. Its objects live in this process's memory, whatever else is killed."""
    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        name = environ["PATH_INFO"].removeprefix(f"/{bucket}/")
        if environ["REQUEST_METHOD"] == "PUT" and "outputs/" in name:
            with lock:
                turned_away = stand.fail > 0
                stand.fail -= turned_away
                stand.failed += turned_away
            if turned_away:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
            stand.gate(name)
            return app(environ, partial(noted, name, start))
        if environ["REQUEST_METHOD"] == "PUT" and stand.conditions != "kept":
            asked = [environ.pop(header, None) for header in ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")]
            if any(asked) and stand.conditions == "501":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start("501 Not Implemented", [("Content-Type", "application/xml")])
                return [b"<Error><Code>NotImplemented</Code><Message>A header is not implemented.</Message></Error>"]
        return app(environ, start)

    def noted(name: str, start: Callable[..., Any], status: str, *rest: Any) -> Any:
        if status.startswith("200"):  # an upload whose sender died amid it is none
            stand.puts.append(name)
        return start(status, *rest)

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=_Silent)
    stand = StandIn(f"http://127.0.0.1:{server.server_port}", bucket)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    botocore_stubber.enabled = False  # clients of this process speak to the server, too
    try:
        # the objects are the process's: those of an earlier stand-in would be found under the same names
        urllib.request.urlopen(urllib.request.Request(f"{stand.url}/moto-api/reset", method="POST"), timeout=60).close()
        stand.client.create_bucket(Bucket=bucket)
        yield stand
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
