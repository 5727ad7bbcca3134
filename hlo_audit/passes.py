"""The passes of one compilation, as its dump shows them: their names, their snapshots, and the part
of the compilation that each is of."""

from __future__ import annotations

import re
from functools import cached_property

from hlo_audit.dump import AuditStage, ModuleDump, Snapshot
from hlo_audit.errors import DumpError
from hlo_audit.hlo.collector import no_collection
from hlo_audit.rule import Phase

_PARTITIONING = re.compile(r"(?:tpu-)?spmd-partitioning")
_PARTITIONERS = ("xla-partitioner", "spmd-partitioner")

# jax 0.12 counts these through the process, so that two compiles of one program differ.
_NUMBERED = re.compile(r"(apply-xla-transforms)-\d+")


def stable_label(snapshot: Snapshot) -> str:
    """Name a pass the same in every compile: ``simplification-1: algsimp``."""
    return _NUMBERED.sub(r"\1", snapshot.label)


class Passes:
    """The snapshots of one module, read.

    Computations that a pass left as they are stand in several modules as one object: what is found
    out of one holds for all of them.

    Attributes:
        dump: where they are from.
        snapshots: first to last.
        modules: one for each.
    """

    def __init__(self, dump: ModuleDump) -> None:
        """Read all of them.

        Raises:
            DumpError, ParseError: where one cannot be read.
            DumpError: where the dump has no pass.
        """
        if not dump.passes:
            raise DumpError(
                f"{dump.folder} holds no snapshot of a pass",
                hint="dump them with compiler option xla_dump_hlo_pass_re=.*",
            )
        self.dump = dump
        with no_collection():
            read = list(dump.read_all())
        self.snapshots = tuple(snapshot for snapshot, _ in read)
        self.modules = tuple(module for _, module in read)

    def __len__(self) -> int:
        return len(self.snapshots)

    def position(self, snapshot: Snapshot | None) -> int | None:
        """The place of a snapshot among them; ``None`` for one that is not there."""
        return None if snapshot is None else self.snapshots.index(snapshot)

    def stage(self, stage: AuditStage) -> int | None:
        """The place of a snapshot that rules read; ``None`` where it is not there."""
        return self.position(self.dump.audited.get(stage))

    def changes_module(self, position: int) -> bool:
        """Whether any computation differs from the snapshot before, to the letter."""
        if position == 0:
            return True
        before, after = self.modules[position - 1 : position + 1]
        # Computations are equal only to themselves.
        return list(before.computations.values()) != list(after.computations.values())

    def pass_name(self, position: int) -> str:
        """The pass that made a snapshot what it is.

        A snapshot from within a pass is charged to that pass, also where it is of a pipeline that
        the pass runs. Where a pipeline starts with another module than the one before ended with,
        and nothing says what came in between, the name is ``before PIPELINE``.
        """
        snapshot = self.snapshots[position]
        if snapshot.stage != "pass":
            return stable_label(snapshot)
        if snapshot.step:
            return self._named_next(position, "") or stable_label(snapshot)
        if snapshot.after != "pipeline-start":
            return stable_label(snapshot)
        outer = next(
            (
                s.pipeline
                for s in self.snapshots[:position][::-1]
                if s.pipeline != snapshot.pipeline
            ),
            "",
        )
        named = self._named_next(position, outer) if outer else None
        return named or f"before {snapshot.pipeline}"

    def _named_next(self, position: int, pipeline: str) -> str | None:
        """The pass that the next snapshot to name one has just run, of this pipeline if it is
        given; a pipeline that was run in the place of a pass is none."""
        inner = {self.snapshots[position].pipeline}
        for later in self.snapshots[position + 1 :]:
            if later.stage != "pass":
                break
            if later.after == "pipeline-start":
                inner.add(later.pipeline)
            elif later.after and (later.pipeline == pipeline if pipeline else not later.step):
                return None if later.after in inner and pipeline else stable_label(later)
        return None

    @cached_property
    def phases(self) -> tuple[Phase | None, ...]:
        """The part of the compilation that each snapshot is of; ``None`` where the dump does not
        show it."""
        laid_out = self._first_laid_out()
        partitioned = self._first_partitioned()
        phases: list[Phase | None] = []
        for position, snapshot in enumerate(self.snapshots):
            if snapshot.stage in ("after_optimizations", "after_codegen"):
                phases.append("laid-out")
            elif partitioned is not None and position < partitioned:
                phases.append("unpartitioned")
            elif laid_out is not None and position >= laid_out:
                phases.append("laid-out")
            elif laid_out is not None and partitioned is not None:
                phases.append("partitioned")
            elif snapshot.stage == "before_optimizations":
                phases.append("unpartitioned")
            else:
                phases.append(None)
        return tuple(phases)

    def _first_laid_out(self) -> int | None:
        last = self.position(self.dump.before_layout_assignment)
        return None if last is None else last + 1

    def _first_partitioned(self) -> int | None:
        if self.modules[0].header.get("num_partitions", "1") == "1":
            return 0
        for position in range(len(self)):
            if _PARTITIONING.fullmatch(self.pass_name(position).rpartition(": ")[2]):
                return position
        # The pass may have found nothing to change.
        of_pipeline = [p for p, s in enumerate(self.snapshots) if s.pipeline in _PARTITIONERS]
        return of_pipeline[-1] + 1 if of_pipeline else None
