"""Write the counts that ``hlo-audit check`` holds the reference models against.

Compiles every model in every layout and mode. HLA001 is left out: the number of annotations changes
with the version of JAX. Read the diff before you commit it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hlo_audit
from hlo_audit.gate import REFERENCE_FILE
from hlo_audit.models import ALL_MODELS
from hlo_audit.program import find_subjects
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

TOPOLOGIES = ("v5p:2x2x1", "v5e:2x2", "v6e:2x2")
TABLE = Path(hlo_audit.__file__).parent / REFERENCE_FILE
LEFT_OUT = "HLA001"


def main() -> None:
    subjects = [
        subject
        for topology in TOPOLOGIES
        for subject in find_subjects(
            [model.name for model in ALL_MODELS], ALL_MODELS, layouts=["all"], topology=topology
        )
    ]
    audits = audit_subjects(subjects, ALL_RULES)
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
            "counts": {code: n for code, n in audit.counts.items() if code != LEFT_OUT},
        }
        for audit in audits
    ]
    TABLE.write_text(json.dumps({"schema_version": 1, "entries": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
