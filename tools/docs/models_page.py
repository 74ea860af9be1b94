"""Writes docs/models.md from the table of tested model families: `python tools/docs/models_page.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

if __name__ == "__main__":
    from family_cases import models_page

    (ROOT / "docs" / "models.md").write_text(models_page(), encoding="utf-8")
