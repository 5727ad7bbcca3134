"""The rules, one file each.

To add one: copy the file of the rule nearest to it, give it the next free code and a slug that
names the problem, and append its ``RULE`` to ``ALL_RULES``. Its examples become tests by
themselves.
"""

if __name__ != "hlo_audit.rules":
    raise ImportError(
        f"the rules are imported as hlo_audit.rules, not as {__name__!r}: "
        "take the top of the hlo-audit checkout off sys.path"
    )

from hlo_audit.rule import Rule
from hlo_audit.rules.flatten_gather import RULE as HLA005
from hlo_audit.rules.missed_reduce_scatter import RULE as HLA004
from hlo_audit.rules.relayout_copy import RULE as HLA002
from hlo_audit.rules.sharding_custom_call import RULE as HLA001
from hlo_audit.rules.unfolded_transpose import RULE as HLA003

ALL_RULES: tuple[Rule, ...] = (HLA001, HLA002, HLA003, HLA004, HLA005)
"""Every rule, by code."""
