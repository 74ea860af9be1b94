"""A hub id, resolved once: its commit, its snapshot folder, and the files a run needs, fetched if they are missing.

Everything goes through huggingface_hub (its cache, its tokens, HF_HUB_OFFLINE, HF_HOME). Tokens are never read or logged here.
Imported only for hub ids.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from batchgen.errors import DiskError, ModelError
from batchgen.inventory import safetensors, weights
from batchgen.inventory.index import INDEX_NAME, ModelIndex, read_index
from batchgen.inventory.meant import meant
from batchgen.inventory.options import ModelOptions, OnProgress
from batchgen.units import size_text

# Files fetched at once: enough to fill a line, few enough that an interruption loses little.
_WORKERS = 4
# Space left alone for what else grows during a download.
_SPARE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A hub model at one commit. `listing` and `headers` are given where weights were not downloaded."""

    folder: Path
    commit: str
    notes: tuple[str, ...] = ()
    listing: dict[str, int] | None = None
    headers: Callable[[str], safetensors.FileHeader] | None = None


def snapshot(model: str, options: ModelOptions, *, on_progress: OnProgress | None = None) -> Snapshot:
    """Resolves a hub id and fetches what is missing: configs always, the chosen weights if `options.download`.

    Offline, or with the hub out of reach, the cache answers alone. Raises ModelError: not found, gated, no such revision, not in
    the cache, disk too small, or whatever the index says.
    """
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # retries are not news; what comes of them is said below
    with _explained(model, options):
        index_path = Path(_fetch(model, INDEX_NAME, options, options.revision))
    folder = index_path.parent
    commit = folder.name
    index = read_index(folder, trust_remote_code=options.trust_remote_code)
    offline = constants.HF_HUB_OFFLINE or options.offline
    sizes = None if offline else _sizes(model, commit, options)
    if sizes is None:
        unreached = "the hub was not asked" if offline else "the hub cannot be reached"
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreached
        return Snapshot(folder, commit, (f"{reason}: {model} is taken from the cache at commit {commit[:12]}",))
    small = [path for path in _wanted_folders(index, sizes) if not weights.is_weight_file(path)]
    with _explained(model, options):
        _fetch_all(model, commit, folder, small, sizes, options, None)
    chosen = _chosen_weights(index, folder, sizes, options)
    if not options.download:
        kept = {path: sizes[path] for path in (INDEX_NAME, *small, *chosen)}
        return Snapshot(folder, commit, (), kept, lambda path: _remote_header(model, commit, path, options))
    with _explained(model, options):
        _fetch_all(model, commit, folder, chosen, sizes, options, on_progress)
    return Snapshot(folder, commit)


def _sizes(model: str, commit: str, options: ModelOptions) -> dict[str, int] | None:
    """Size of every file at the commit; None when the hub does not answer, so that a full cache is enough."""
    try:
        info = huggingface_hub.HfApi().model_info(model, revision=commit, files_metadata=True)
    except (RepositoryNotFoundError, RevisionNotFoundError, HfHubHTTPError, OSError):
        return None
    except Exception as error:
        if _of_the_network(error):
            return None
        raise
    return {file.rfilename: int(file.size or 0) for file in info.siblings or ()}


def _of_the_network(error: Exception) -> bool:
    """Whether an exception comes from the HTTP client, whose name has changed between versions of huggingface_hub."""
    return type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}


def _wanted_folders(index: ModelIndex, sizes: dict[str, int]) -> list[str]:
    names = {entry.name for entry in index.entries}
    top = [path for path in sizes if "/" not in path and path.endswith(".py")] if index.foreign else []
    return sorted([*top, *(path for path in sizes if path.count("/") == 1 and path.partition("/")[0] in names)])


def _chosen_weights(index: ModelIndex, folder: Path, sizes: dict[str, int], options: ModelOptions) -> list[str]:
    """The weight files of all components. A fault is left for `folder_facts` to report with all the others."""
    chosen: list[str] = []
    for entry in index.entries:
        if entry.weightless:
            continue
        choice = weights.choose(
            entry.name, entry.library, list(sizes), lambda path: (folder / path).read_text(encoding="utf-8"),
            variant=options.variant, allow_pickle=options.allow_pickle,
        )
        if choice.fault:
            raise ModelError(f"the model on the hub cannot be loaded:\n  {choice.fault}")
        chosen.extend(choice.files)
    return chosen


def _fetch(model: str, path: str, options: ModelOptions, revision: str | None, bar: Any = None) -> str:
    quiet: Any = _Quiet
    return huggingface_hub.hf_hub_download(
        model, path, revision=revision, cache_dir=options.cache_dir, tqdm_class=bar or quiet, library_name="batchgen",
        local_files_only=options.offline,
    )


def _fetch_all(
    model: str, commit: str, folder: Path, paths: Sequence[str], sizes: dict[str, int], options: ModelOptions,
    on_progress: OnProgress | None,
) -> None:
    """Fetches the files that are not in the cache, a few at a time. Whole files are kept when it is interrupted."""
    missing = [path for path in paths if not (folder / path).is_file()]
    if not missing:
        return
    needed = sum(sizes[path] for path in missing)
    _check_disk(model, needed, len(missing), folder)
    bar = _shared_bar(sum(sizes[path] for path in paths), sum(sizes[path] for path in paths) - needed, on_progress)
    with ThreadPoolExecutor(_WORKERS) as pool:
        running = [pool.submit(_fetch, model, path, options, commit, bar) for path in missing]
        try:
            for future in running:
                future.result()
        except BaseException:
            for future in running:
                future.cancel()
            raise


def _check_disk(model: str, needed: int, count: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{model}: {size_text(needed)} in {count} file(s) are to be downloaded, but only {size_text(free)} are free at {folder.anchor}"
            f"{folder.relative_to(folder.anchor)}",
            hint="Free some space, or name another place with --cache-dir (or HF_HOME). What is downloaded already is kept.",
        )


class _Quiet:
    """Stands in for tqdm where a small file is fetched: shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _shared_bar(total: int, here: int, on_progress: OnProgress | None) -> type[_Quiet]:
    """A tqdm-like class whose instances, one a file, add up into one progress report."""
    lock = threading.Lock()
    done = here

    class Shared(_Quiet):
        def __init__(self, *args: Any, initial: int = 0, **kwargs: Any) -> None:
            super().__init__()
            if initial:
                self.update(initial)

        def update(self, count: float | None = 1) -> None:
            nonlocal done
            with lock:
                done = min(total, done + int(count or 0))
                if on_progress is not None:
                    on_progress(done, total)

    return Shared


def _remote_header(model: str, commit: str, path: str, options: ModelOptions) -> safetensors.FileHeader:
    """A safetensors header by range requests: a plan needs no weights."""
    with _explained(model, options):
        found = huggingface_hub.HfApi().parse_safetensors_file_metadata(model, path, revision=commit)
    tensors = tuple(safetensors.TensorHeader(name, info.dtype, tuple(info.shape)) for name, info in found.tensors.items())
    return safetensors.FileHeader(tensors, (), b"")


@contextmanager
def _explained(model: str, options: ModelOptions) -> Iterator[None]:
    """Turns the hub's exceptions into what a user can do about them."""
    revision = f" at revision {options.revision!r}" if options.revision else ""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{model} is gated: its owner wants you to ask for access",
            hint=f"Ask for it at https://huggingface.co/{model} and log in with `hf auth login`.") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {options.revision!r}", hint="Pass a branch, tag or full commit that exists.") from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"{model}{revision} is not in the cache, and HF_HUB_OFFLINE is set{_unless_known(model)}",
                hint="Run once with a connection, or pass the folder of the model.") from error
        raise ModelError(
            f"{model}{revision} is not in the cache, and the hub cannot be reached{_unless_known(model)}",
            hint="Check the connection, or pass the folder of the model.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {model!r} on the hub (or it is private){_unless_known(model)}",
            hint="Check the name; for a private one log in with `hf auth login`.") from error
    except EntryNotFoundError as error:
        raise ModelError(
            f"{model}{revision} is not a pipeline: it has no {INDEX_NAME}",
            hint="--model takes a model in diffusers' layout; look for one whose files include model_index.json.") from error
    except HFValidationError as error:
        raise ModelError(f"{model!r} is no hub id (OWNER/NAME)") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise ModelError(f"{model}: the hub answered with status {status}", hint="Try again later; what is downloaded is kept.") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
            raise DiskError(f"{model}: the cache cannot take the download ({error.strerror}); what is there is kept") from error
        raise
    except Exception as error:
        if _of_the_network(error):
            raise ModelError(
                f"{model}: the connection was lost during the download", hint="Run the same command again; it goes on from here.",
            ) from error
        raise


def _unless_known(model: str) -> str:
    """A near name, where the name itself is not one that profiles know."""
    near = meant(model)
    return "" if f"{model!r}".lower() in near.lower() else near
