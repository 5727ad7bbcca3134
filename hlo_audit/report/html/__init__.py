"""A report as one HTML page that needs nothing else: no network, no other file.

A page is passed on and opened by people who never saw the dump, and everything out of a dump is
untrusted. So there are three walls, each enough by itself: control characters and direction marks
are spelt out, all text is escaped by the template engine, and a content security policy allows
only the scripts and styles of this package, by their hashes, and no request at all.

The scripts draw the charts and filter the list; without them the page holds the same numbers in
tables.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any

from hlo_audit._version import __version__
from hlo_audit.examination import Examined, Pair
from hlo_audit.report import Report
from hlo_audit.report.html.limits import MOST_OF_ANY_TEXT
from hlo_audit.report.html.page import page_of
from hlo_audit.report.sources import Repository
from hlo_audit.report.wording import clip, plain

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "charts.js")
STYLES = ("page.css",)

_ENDS_SCRIPT = re.compile(r"</script|<!--|<script", re.IGNORECASE)


def render_html(
    report: Report, examined: Sequence[Examined], pairs: Sequence[Pair], repository: Repository
) -> str:
    """The page as text, with a line end; the same for the same input.

    Args:
        report: the audits and the verdict.
        examined: one for each program of ``report``, in its order.
        pairs: which of them to show side by side.
        repository: what the Python lines are relative to, and whose files are quoted.
    """
    page = page_of(report, examined, pairs, repository)
    scripts = [_asset(name) for name in SCRIPTS]
    styles = [_asset(name) for name in STYLES]
    text = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            page=page,
            version=__version__,
            scripts=scripts,
            styles=styles,
            policy=_policy(scripts, styles),
            licences=_licences(),
            data=_data_island(page.charts),
        )
    )
    return str(text)


def _environment() -> Environment:
    """A template engine that escapes all it is given, and refuses names that do not exist."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["thousands"] = "{:,}".format
    return environment


def _harmless(value: object) -> object:
    """Spell out what must not stand in a page, in every text that the template puts into it, and
    cut what is far too long.

    What the engine takes for markup is of this package alone; numbers are what they are, and all
    else is text, whatever its type.
    """
    if value is None or isinstance(value, int | float) or hasattr(value, "__html__"):
        return value
    return plain(clip(str(value), MOST_OF_ANY_TEXT))


def _asset(name: str) -> Markup:
    """A file of this package, as markup that is put into the page as it is."""
    from markupsafe import Markup

    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    if name.endswith(".js") and _ENDS_SCRIPT.search(text):
        raise ValueError(f"{name} cannot stand inside of a script element")
    return Markup(text)  # ours


def _licences() -> list[tuple[str, list[str]]]:
    """Those of the chart library and of what is bundled with it: name, lines."""
    folder = resources.files(__name__).joinpath("vendor")
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".LICENSE")),
        key=lambda file: file.name,
    )
    return [
        (file.name.removesuffix(".LICENSE"), file.read_text(encoding="utf-8").split("\n"))
        for file in files
    ]


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """The content security policy: these scripts and styles, and nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _data_island(data: object) -> Markup:
    """JSON for the inside of a script element, where no markup is read but its end.

    It is ASCII, without ``<``, ``>`` and ``&``: nothing in it can end the element or start a
    comment. Texts are made harmless as everywhere: the charts put them on the page as they are.
    """
    from markupsafe import Markup

    text = json.dumps(
        _harmless_all(data), ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # all that could be markup has just been taken out


def _harmless_all(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _harmless_all(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_harmless_all(value) for value in data]
    return _harmless(data)
