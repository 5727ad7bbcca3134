"""The files that the HTML report is made of: the pinned library, the packages, the colours."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from html_pages import TOP

ASSETS = TOP / "hlo_audit" / "report" / "html"


def test_the_chart_library_is_the_one_pinned() -> None:
    wrong_files = runpy.run_path(str(TOP / "scripts" / "vendor_chart_library.py"))["wrong_files"]
    assert wrong_files() == []


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_page_is_packed_whole(kind: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(tmp_path)],
        cwd=TOP,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = tmp_path.iterdir()
    if kind == "wheel":
        names = zipfile.ZipFile(built).namelist()
    else:
        with tarfile.open(built) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
    for path in ASSETS.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(TOP).as_posix() in names
    licences = [name for name in names if name.endswith("d3.LICENSE")]
    assert licences


# -- colours


def _colours() -> dict[str, dict[str, str]]:
    style = (ASSETS / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    light, dark, paper = found
    return {"light": light, "dark": {**light, **dark}, "paper": {**light, **paper}}


def _contrast(one: str, other: str) -> float:
    """By WCAG 2.2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_the_contrast_is_computed_as_the_standard_says() -> None:
    assert _contrast("#ffffff", "#000000") == pytest.approx(21)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark", "paper"])
def test_text_and_drawings_can_be_told_from_their_ground(scheme: str) -> None:
    colours = _colours()[scheme]
    assert len(colours) == 18
    for text in ("text", "muted", "accent", "bad", "good", "warn"):
        for ground in ("ground", "surface", "code-ground", "bad-ground", "good-ground"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert _contrast(colours["mark-text"], colours["mark-ground"]) >= 4.5
    assert _contrast(colours["text"], colours["bar-ground"]) >= 4.5
    for ground in ("ground", "surface", "bar-ground", "area"):
        assert _contrast(colours["bar"], colours[ground]) >= 3, ground
