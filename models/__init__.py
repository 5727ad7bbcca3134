"""The reference models: small, real training steps that show each layout fault and its fix."""

if __name__ != "hlo_audit.models":
    raise ImportError(
        f"the reference models are imported as hlo_audit.models, not as {__name__!r}: "
        "take the top of the hlo-audit checkout off sys.path"
    )

from hlo_audit.models.lm_head import LM_HEAD
from hlo_audit.models.mhc import MHC
from hlo_audit.models.moe_gmm import MOE_GMM
from hlo_audit.program import Model

ALL_MODELS: tuple[Model, ...] = (LM_HEAD, MHC, MOE_GMM)
"""Every reference model, in the order of ``hlo-audit models``."""
