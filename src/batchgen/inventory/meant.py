"""Which model a name that names none was meant to be: `builtin`, a hub id that a profile knows, a model folder that lies there.

Only asked on the way to an error: it reads all profiles.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path

from batchgen.inventory.profiles import config_dir

_CLOSE = 0.7
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)(?:[/?#]|$)")


def meant(source: str) -> str:
    """`; did you mean 'builtin'?`, or an empty text where nothing is near."""
    if address := _PAGE.match(source):
        return f"; did you mean {address['id']!r}?"
    found = {name.lower(): name for name in (*_hub_ids(), *_folders(Path(source).expanduser()))}
    close = difflib.get_close_matches(source.lower(), list(found), n=1, cutoff=_CLOSE)
    return f"; did you mean {found[close[0]]!r}?" if close else ""


def _hub_ids() -> list[str]:
    """`builtin` is one of them."""
    return [
        name for path in (config_dir() / "models").glob("*.toml")
        for name in tomllib.loads(path.read_text(encoding="utf-8")).get("models", ())
    ]  # fmt: skip


def _folders(path: Path) -> list[str]:
    """Model folders beside the one that was named, written as it was."""
    try:
        return [str(path.parent / place.parent.name) for place in path.parent.glob("*/model_index.json")]
    except OSError:
        return []
