"""``python -m hlo_audit``."""

from hlo_audit.cli import main

main()
