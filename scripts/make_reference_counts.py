"""Write the counts that ``hlo-audit check`` holds the reference models against.

Compiles every model in every layout and mode with the installed jax and libtpu, and puts the counts
into the table of these versions; those of others stay as they are. Run it in an environment of each
version; the versions that a release supports are those of its tables. Read the diff before you
commit it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hlo_audit
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import Subject, find_subjects
from hlo_audit.reference import REFERENCE_FILE, SCHEMA_VERSION
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

# Beside each model's own.
MORE_TOPOLOGIES = {"lm-head": ("v5e:2x2", "v6e:2x2")}
TABLE = Path(hlo_audit.__file__).parent / REFERENCE_FILE


def subjects() -> list[Subject]:
    found: list[Subject] = []
    for model in ALL_MODELS:
        for topology in (None, *MORE_TOPOLOGIES.get(model.name, ())):
            found += find_subjects([model.name], ALL_MODELS, layouts=["all"], topology=topology)
        if model.quick_settings:
            quick = {name: str(value) for name, value in model.quick_settings.items()}
            found += find_subjects([model.name], ALL_MODELS, layouts=["all"], settings=quick)
    return found


def main() -> None:
    audits = audit_subjects(subjects(), ALL_RULES)
    for audit in audits:
        if audit.error is not None:
            sys.exit(f"{audit.label} on {audit.topology}: {audit.error}")
    entries = [
        {
            "program": audit.program,
            "mode": audit.mode,
            "layout": audit.layout,
            "platform": audit.platform,
            "topology": audit.topology,
            "settings": dict(audit.settings),
            "counts": audit.counts,
        }
        for audit in audits
    ]
    versions = {name: audits[0].versions[name] for name in ("jax", "libtpu")}
    stored = json.loads(TABLE.read_text())
    others = [
        table
        for table in stored.get("tables", [])
        if {name: table[name] for name in versions} != versions
    ]
    tables = sorted(
        [*others, {**versions, "entries": entries}],
        key=lambda table: [int(part) for part in table["jax"].split(".")],
    )
    content = {"schema_version": SCHEMA_VERSION, "tables": tables}
    TABLE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
