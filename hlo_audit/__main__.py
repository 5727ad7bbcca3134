"""``python -m hlo_audit``."""

import sys
from pathlib import Path

# Python puts the working directory first on the path. What lies there, beside a dump perhaps, is
# not to be imported as jax or json; a function that is named on the command line is found there
# all the same. A checkout that is run without having been installed needs its own folder.
if not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parent.parent):
    del sys.path[0]

from hlo_audit.cli import main

main()
