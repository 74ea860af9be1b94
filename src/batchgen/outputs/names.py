"""Output names: from a template and a job's fields to a path below the output folder that every file system takes.

Names come from the row and the template alone, never from a clock or from what else is in the folder. Whatever a prompt, an id or a
column holds, its text can neither leave the folder nor make a new one: only the template's own slashes do.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from batchgen.errors import UsageError

FIELDS = ("index", "id", "slug", "prompt", "seed", "width", "height", "model", "k")
COMPONENT_BYTES = 200  # of 255, so that a sidecar's or temp file's suffix still fits
MAX_FOLDERS = 8  # so that a whole path stays far below the 4,096 bytes that Linux takes
SLUG_BYTES = 60
_NUMBERS = ("index", "seed", "width", "height", "k")
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9\u00b9\u00b2\u00b3]|lpt[0-9\u00b9\u00b2\u00b3])(?=\.|$)", re.IGNORECASE)
_UNPORTABLE = re.compile(r'[\\/:*?"<>|\x00-\x1f\x7f-\x9f]')
_SPEC = re.compile(r"0?[1-9]?[0-9]?d?")
_ASCII_BREAKS = {code: " " for code in range(128) if not chr(code).isalnum()}
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Cn")  # a terminal acts on them, or nobody sees them
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed `--name`. `parts` are (literal, None, "") or ("", field, format)."""

    text: str
    parts: tuple[tuple[str, str | None, str], ...]
    fields: frozenset[str]
    counts_rows: bool  # two rows can never share a name: it begins with the row's index, set off from what follows


def field_name(heading: str) -> str:
    """A manifest column as a template names it: casefolded, spaces and hyphens as underscores."""
    return re.sub(r"[\s-]", "_", heading.strip(" \t\u00a0\ufeff").casefold())


def parse_template(text: str, *, extension: str = "", columns: Collection[str] | None = None) -> Template:
    """Reads a template. `columns`: the manifest's other columns, or None while they are unknown. Raises UsageError."""
    if extension and text.casefold().endswith(extension.casefold()):
        text = text[: -len(extension)]
    known = None if columns is None else {*FIELDS, *map(field_name, columns)}
    parts: list[tuple[str, str | None, str]] = []
    for match in _PART.finditer(text):
        piece = match.group()
        if piece in ("{", "}"):
            raise _bad(text, f"a single {piece}", "write a field like {id}, or {{ for a brace")
        if match.group(1) is None:
            piece = piece[0] if piece in ("{{", "}}") else piece
            if parts and parts[-1][1] is None:
                piece = parts.pop()[0] + piece
            parts.append((piece, None, ""))
            continue
        name, _, spec = match.group(1).partition(":")
        name = field_name(name)
        if not name or (known is not None and name not in known):
            raise _bad(text, f"no field {{{name}}}", f"fields: {', '.join(sorted(known or FIELDS))}")
        if spec and (name not in _NUMBERS or not _SPEC.fullmatch(spec)):
            raise _bad(text, f"format {spec!r} of {{{name}}}", "only whole numbers take one, like {index:06d}")
        parts.append(("", name, spec))
    _check_literals(text, parts)
    fields = frozenset(field for _, field, _ in parts if field is not None)
    return Template(text, tuple(parts), fields, _counts_rows(parts) and "seed" not in fields)


def _counts_rows(parts: Sequence[tuple[str, str | None, str]]) -> bool:
    return len(parts) > 1 and parts[0][1] == "index" and parts[1][1] is None and not parts[1][0][0].isdigit()


def _check_literals(text: str, parts: Collection[tuple[str, str | None, str]]) -> None:
    literal = "".join(piece if field is None else "x" for piece, field, _ in parts)
    if not literal:
        raise _bad(text, "it is empty", "use the default, {index:06d}-{slug}")
    if literal.startswith("/") or literal.endswith("/") or "//" in literal:
        raise _bad(text, "an empty folder or file name", "subfolders are written a/b, below the output folder")
    for piece, field, _ in parts:
        if field is None and (match := _UNPORTABLE.search(piece.replace("/", ""))):
            raise _bad(text, f"{match.group()!r}, which some file systems refuse", "leave it out; / makes a subfolder")
    if literal.count("/") > MAX_FOLDERS:
        raise _bad(text, "too many folders", f"use at most {MAX_FOLDERS}")
    if any(component in (".", "..") for component in literal.split("/")):
        raise _bad(text, "a . or .. folder", "names stay inside the output folder")


def _bad(text: str, what: str, hint: str) -> UsageError:
    return UsageError(f"--name {text!r}: {what}", option="--name", hint=hint)


def plan_name(template: Template | str, fields: Mapping[str, object], *, pictures: int = 1, extension: str = ".png") -> str:
    """The planned path below the output folder, POSIX separators, portable.

    `fields` holds index, id, prompt, seed, width, height, model, k and the manifest's other columns under `field_name`s; `slug` is
    made from the prompt. `pictures` of the row above 1 add `-{k}` where the template has no {k}.
    """
    parsed = parse_template(template, extension=extension) if isinstance(template, str) else template
    suffix = f"-{fields.get('k', 0)}" if pictures > 1 and "k" not in parsed.fields else ""
    components: list[list[tuple[str, bool]]] = [[]]
    for piece, field, spec in parsed.parts:
        if field is None:
            first, *rest = piece.split("/")
            components[-1].append((first, False))
            components.extend([(folder, False)] for folder in rest)
        else:
            components[-1].append((_value(field, spec, fields, whole=parsed.counts_rows), field not in ("index", "k")))
    last = len(components) - 1
    return "/".join(
        _component(parts, (suffix + extension) if place == last else "") for place, parts in enumerate(components)
    )


def _value(field: str, spec: str, fields: Mapping[str, object], *, whole: bool) -> str:
    if field == "slug":
        return slug(str(fields.get("prompt") or ""), marked=not whole)
    value = fields.get(field)
    if value is None:
        return "auto" if field in ("width", "height") else ""
    if spec and isinstance(value, int):
        return format(value, spec if spec.endswith("d") else spec + "d")
    return str(value)


def slug(text: str, *, marked: bool = False) -> str:
    """The text's letters and digits in lower case, words joined by hyphens, at most SLUG_BYTES of UTF-8 and whole words where possible.

    `marked`: a slug that was cut ends in a short hash of the whole text, so that two long prompts differ.
    """
    folded = unicodedata.normalize("NFC", text[:4000]).lower()
    words = (folded if folded.isascii() else _letters(folded)).translate(_ASCII_BREAKS).split()
    whole = "-".join(words)
    if whole and len(whole.encode()) <= SLUG_BYTES and len(text) <= 4000:
        return whole
    if not whole:
        return f"untitled-{short_hash(text)}" if marked else "untitled"
    room = SLUG_BYTES - (9 if marked else 0)
    kept = cut_bytes(whole, room)
    if whole[len(kept) : len(kept) + 1] not in ("", "-") and "-" in kept[len(kept) // 2 :]:
        kept = kept.rpartition("-")[0]
    return kept.rstrip("-") + (f"-{short_hash(text)}" if marked else "")


def _letters(text: str) -> str:
    # marks belong to their letters: without them Thai or Hindi words fall apart; one of a sign that goes, goes with it
    kept, letter = [], False
    for char in text:
        kind = unicodedata.category(char)[0]
        letter = kind in "LN" or (kind == "M" and letter)
        kept.append(char if letter or char.isascii() else " ")
    return "".join(kept)


def short_hash(text: str) -> str:
    """8 hex digits of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def cut_bytes(text: str, room: int) -> str:
    """The longest beginning of `text` that takes at most `room` bytes of UTF-8."""
    return text.encode()[: max(room, 0)].decode("utf-8", "ignore")


def clean(text: str) -> str:
    """A text as part of a file name: composed, with what some file system refuses, or a terminal acts on, as underscores."""
    composed = unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode()) if not text.isascii() else text
    safe = _UNPORTABLE.sub("_", composed)
    if safe.isascii():
        return safe
    # the joiners stay: emoji and Indic words are written with them
    return "".join("_" if unicodedata.category(char) in _HIDDEN and char not in "\u200c\u200d" else char for char in safe)


def _component(parts: list[tuple[str, bool]], ending: str) -> str:
    """One file or folder name. `parts`: (text, may be cut). `ending` stays whole."""
    original = "".join(text for text, _ in parts)
    cleaned = [(clean(text), cuttable) for text, cuttable in parts]
    whole = "".join(text for text, _ in cleaned)
    room = COMPONENT_BYTES - len(ending.encode()) - 1  # 1: the underscore that may come before it
    if len(whole.encode()) > room:
        whole = _cut(cleaned, room, short_hash(original))
    whole = whole.strip()
    name = whole.lstrip(".-~ ").rstrip(". ")  # Windows drops dots and spaces at the end
    if not name.strip("_"):
        name = f"_{short_hash(original)}"
    elif not whole.startswith(name[0]) or _RESERVED.match(name):
        name = "_" + name  # what began with a dot or dash must not hide, nor read as an option
    return name + ending


def _cut(parts: list[tuple[str, bool]], room: int, mark: str) -> str:
    """The parts within `room` bytes: the longest that may be cut gives way, and a hash of the whole stands for what is lost."""
    texts = [text for text, _ in parts]
    places = [place for place, (_, cuttable) in enumerate(parts) if cuttable]
    if not places:
        return cut_bytes("".join(texts), room - 9) + f"-{mark}"
    for place in sorted(places, key=lambda place: -len(texts[place].encode())):
        over = sum(len(text.encode()) for text in texts) - room
        if over <= 0:
            break
        size = len(texts[place].encode())
        texts[place] = cut_bytes(texts[place], max(0, size - over - 9)).rstrip(" .-") + f"-{mark}"
    whole = "".join(texts)
    return whole if len(whole.encode()) <= room else cut_bytes(whole, room - 9) + f"-{mark}"


def name_key(path: str) -> str:
    """What two paths share when some file system takes them for one: case-folded, composed."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def unique(candidate: str, taken: Callable[[str], bool]) -> str:
    """`candidate`, or it with `_2`, `_3`, ... before its extension: the first whose path is not `taken` (asked with its name_key)."""
    if not taken(name_key(candidate)):
        return candidate
    number = 2
    while taken(name_key(numbered(candidate, number))):
        number += 1
    return numbered(candidate, number)


def numbered(path: str, number: int) -> str:
    """`a/b.png` as `a/b_2.png`, still within the limit of a name."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    if not dot:
        stem, suffix = name, ""
    ending = f"_{number}{dot}{suffix}"
    return f"{folder}{slash}{cut_bytes(stem, COMPONENT_BYTES - len(ending.encode())).rstrip('. ')}{ending}"


class Names:
    """Names given out so far, each once. Holds 16 bytes a name."""

    def __init__(self) -> None:
        self._given: dict[bytes, int] = {}

    def claim(self, candidate: str) -> str:
        """`candidate`, or the first numbered form of it that nobody has."""
        key = self._digest(candidate)
        if key not in self._given:
            self._given[key] = 1
            return candidate
        number = self._given[key] + 1
        while (other := self._digest(numbered(candidate, number))) in self._given:
            number += 1
        self._given[key] = number
        self._given[other] = 1
        return numbered(candidate, number)

    @staticmethod
    def _digest(path: str) -> bytes:
        return hashlib.blake2b(name_key(path).encode(), digest_size=16).digest()
