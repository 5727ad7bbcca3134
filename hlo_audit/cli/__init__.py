"""The command line: read options, call the layers below, render, exit.

Exit codes: 0 clean, 1 the gate failed, 2 the call or the input is wrong, 3 a compile failed.
What costs time to import is imported by the commands that need it.
"""

from __future__ import annotations

import io
import sys
from typing import NoReturn

import click

from hlo_audit._version import __version__
from hlo_audit.cli import cache, check, diff, listings, lower, merge, passes, prove, report, setup
from hlo_audit.cli.output import complain, drop_output, say
from hlo_audit.errors import HloAuditError

EXIT_USAGE = 2
EXIT_INTERNAL_ERROR = 70
"""``EX_SOFTWARE`` of sysexits: a fault of this tool is no verdict."""
EXIT_INTERRUPTED = 130

# How click 8.2 and later call for the help; earlier ones print it themselves.
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main() -> NoReturn:
    """Run the command line. What goes wrong is one line on standard error and an exit code."""
    code: int | str | None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False, prog_name="hlo-audit")
    except HloAuditError as error:
        complain(error)
        code = error.exit_code
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)  # the help
        code = EXIT_USAGE
    except click.ClickException as error:
        say(f"hlo-audit: error: {error.format_message()}")
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        say("hlo-audit: interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
        code = 0
    except OSError as error:
        say(f"hlo-audit: error: {error.strerror or error}")
        code = EXIT_USAGE
    except Exception as error:  # a fault of this tool: shown whole, so that it can be reported
        import traceback

        for line in traceback.format_exc().splitlines():
            say(line)
        say(f"hlo-audit: internal error: {error!r}")
        code = EXIT_INTERNAL_ERROR
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hlo-audit")
def cli() -> None:
    """Inspect XLA HLO, and stop layout and sharding regressions of JAX programs.

    PROGRAM is a reference model (see "hlo-audit models"), a function that builds a step, as
    path/to/file.py:function or package.module:function, a dump folder, or an HLO file: .txt, .hlo
    or .hlo.pb, each also .gz; "-" reads text from standard input.
    """


for _command in (
    check.check,
    merge.merge,
    lower.lower,
    passes.passes,
    listings.explain,
    listings.rules,
    listings.models,
    cache.cache,
    prove.prove,
    diff.diff,
    report.report,
    setup.init,
    setup.doctor,
):
    cli.add_command(_command)
