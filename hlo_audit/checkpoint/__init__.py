"""Keep one canonical checkpoint whatever layout a run stores its arrays in.

A checkpoint holds each array as the model's canonical layout stores it. On the way out and in, the
arrays that a run stores otherwise are turned, and so are the optimiser's moments of them; a model
describes what that takes (:class:`hlo_audit.stored.StoredLayouts`), and nothing here knows any
model. No value changes: there and back is exact.

A tree is any pytree: nested dicts and tuples, NamedTuples, optimiser states, or what a checkpoint
library restores. Its leaves are numpy arrays, jax arrays, or ``jax.ShapeDtypeStruct``, which stands
for an array that is not there yet. Leaves that the model does not describe pass through as they
are. jax is imported on the first call.
"""

from hlo_audit.checkpoint.checks import check
from hlo_audit.checkpoint.metadata import check_metadata, metadata
from hlo_audit.checkpoint.sharding import check_sharding, partition_spec
from hlo_audit.checkpoint.transform import convert, from_canonical, to_canonical

__all__ = [
    "check",
    "check_metadata",
    "check_sharding",
    "convert",
    "from_canonical",
    "metadata",
    "partition_spec",
    "to_canonical",
]
