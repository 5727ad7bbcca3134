"""Programs through an executor: threads, processes, and a dask cluster of separate processes."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import hlo_audit
from command_line import PATIENCE_SECONDS, assert_refused, is_running, run, start, wait_until
from hlo_audit.cache import Cache
from hlo_audit.compiling import Compiling
from hlo_audit.dask_cluster import connected
from hlo_audit.errors import (
    CompileError,
    DumpError,
    HloAuditError,
    InternalError,
    ParseError,
    RefusedReshapeError,
    UsageError,
)
from hlo_audit.program import Lowering
from hlo_audit.remote import Answer, Task, audit_through, run_task
from hlo_audit.report.json import program_to_json
from hlo_audit.rules import ALL_RULES
from hlo_audit.run import audit_subjects

PROGRAMS = Path(__file__).parent / "programs"


def a_program(build: str = "matmul.py:build", **changes: Any) -> Lowering:
    """A tiny program for two CPU devices, named as from the folder of the programs."""
    lowering = Lowering(
        program=build,
        build=build,
        mode="explicit",
        layout=None,
        settings={},
        mesh={"data": -1},
        platform="cpu",
        topology="2",
    )
    return dataclasses.replace(lowering, **changes)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROGRAMS)


# -- what goes there and comes back


@pytest.mark.parametrize(
    "error",
    [
        HloAuditError("a", hint="b"),
        UsageError("a", hint="b", log=("c", "d")),
        DumpError("a"),
        InternalError("a"),
        CompileError("a", hint="b", log=("c",)),
        ParseError("a", line=1, column=2, path="p", hint="b"),
        RefusedReshapeError("a", operand="f", sizes=(1, 2), frames=(("f", 1, "g"),), hint="b"),
    ],
)
def test_an_error_survives_the_way_between_processes(error: HloAuditError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert (str(back), back.args) == (str(error), error.args)


class Recording(Executor):
    """Does what it is given at once; keeps it as it would go over a wire."""

    def __init__(self, change: Callable[[Task], Task] = lambda task: task) -> None:
        self.change = change
        self.sent: list[bytes] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent.append(pickle.dumps((function, args)))
        done: Future[Any] = Future()
        function, (task,) = pickle.loads(self.sent[-1])
        done.set_result(pickle.loads(pickle.dumps(function(self.change(task)))))
        return done


def audits_through(executor: Executor, *lowerings: Lowering) -> list[Any]:
    return audit_subjects(lowerings, ALL_RULES, executor=executor)


def test_a_task_is_small_and_needs_no_file_of_this_process(tmp_path: Path) -> None:
    executor = Recording()
    failing = a_program("no_such.py:build")
    (audit,) = audits_through(executor, failing)
    assert "no_such.py" in str(audit.error)
    assert len(executor.sent[0]) < 20_000
    task = pickle.loads(executor.sent[0])[1][0]
    assert task.lowering.build == f"{PROGRAMS}/no_such.py:build"
    assert (task.cached, task.cache_folder) == (False, None)


def test_a_worker_keeps_dumps_in_its_own_usual_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Recording()

    def folder_of(cache: Cache) -> Path | None:
        lowering = a_program("no_such.py:build")
        audit_subjects([lowering], ALL_RULES, how=Compiling(cache=cache), executor=executor)
        task: Task = pickle.loads(executor.sent[-1])[1][0]
        assert task.cached
        return task.cache_folder

    monkeypatch.setenv("HLO_AUDIT_CACHE_DIR", str(tmp_path))
    assert folder_of(Cache(tmp_path)) is None
    assert folder_of(Cache(tmp_path / "named")) == tmp_path / "named"


def test_code_that_is_another_on_the_worker_is_refused(tmp_path: Path) -> None:
    def other(task: Task) -> Task:
        return dataclasses.replace(task, source_digest="0" * 64)

    def older(task: Task) -> Task:
        return dataclasses.replace(task, version="0.0.1")

    def elsewhere(task: Task) -> Task:
        lowering = dataclasses.replace(task.lowering, build="/no/such/matmul.py:build")
        return dataclasses.replace(task, lowering=lowering)

    for change, words in (
        (other, f"has another file {PROGRAMS}/matmul.py"),
        (elsewhere, "has no file /no/such/matmul.py"),
        (older, "not 0.0.1"),
    ):
        (audit,) = audits_through(Recording(change), a_program())
        assert isinstance(audit.error, UsageError)
        assert words in str(audit.error)


class Broken(Executor):
    """Fails as engines do."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.error is None:
            raise RuntimeError("cannot schedule new futures after shutdown")
        done: Future[Any] = Future()
        done.set_exception(self.error)
        return done


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "could not do the task: RuntimeError: cannot schedule new futures"),
        (ModuleNotFoundError("No module named 'hlo_audit'"), "No module named 'hlo_audit'"),
        (pickle.PicklingError("a\nb"), "PicklingError: a b"),
        (CompileError("as it is"), "as it is"),
    ],
)
def test_what_goes_wrong_with_a_task_is_the_error_of_its_program(
    error: BaseException | None, words: str
) -> None:
    first, second = audits_through(Broken(error), a_program(), a_program(mode="auto"))
    assert words in str(first.error)
    assert first.error is not None
    assert first.error.exit_code == 3
    assert (second.program, second.mode) == ("matmul.py:build", "auto")


def test_tasks_that_wait_are_cancelled_where_the_run_ends() -> None:
    waiting: list[Future[Answer]] = []

    class Slow(Executor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if not waiting:
                future.set_exception(ValueError("first"))
            waiting.append(future)
            return future

    def interrupt(*done: object) -> None:
        raise KeyboardInterrupt

    lowerings = [a_program(), a_program()]
    with pytest.raises(KeyboardInterrupt):
        audit_through(
            Slow(), lowerings, ALL_RULES, {}, timeout_seconds=1, cache=None, on_done=interrupt
        )
    assert waiting[1].cancelled()


def test_the_executor_is_for_programs_with_a_name() -> None:
    with pytest.raises(UsageError, match="executor is for programs with a name"):
        hlo_audit.audit(lambda x: x, 1.0, executor=Broken(None))


def test_dask_is_imported_by_none_that_do_not_ask_for_it() -> None:
    code = """
import sys
import hlo_audit.api, hlo_audit.cli, hlo_audit.dask_cluster, hlo_audit.run
try:
    hlo_audit.cli.cli.main(["check", "--help"], standalone_mode=False)
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"dask", "distributed"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--dask ADDRESS" in done.stdout


def test_dask_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"hlo-audit\[dask\]"), connected("tcp://127.0.0.1:1"):
        pass


@pytest.mark.parametrize("address", ["", "nonsense", "foo://bar:1"])
def test_an_address_that_is_none_is_refused_in_a_line(address: str) -> None:
    check = ("check", "matmul.py:build", "--mesh", "data=2", "--platform", "cpu", "--no-config")
    assert_refused(run(*check, "--dask", address), "dask")


def test_what_does_not_go_with_dask_is_refused() -> None:
    for options, words in (
        (("--jobs", "2"), "--jobs is for this machine"),
        (("--against", "HEAD"), "do not have the code of a revision"),
    ):
        check = ("check", "matmul.py:build", "--mesh", "data=2", "--no-config")
        assert_refused(run(*check, "--dask", "tcp://127.0.0.1:1", *options), words)


# -- threads and processes of this machine


@pytest.mark.slow
def test_any_executor_gives_what_this_process_gives(tmp_path: Path) -> None:
    lowerings = [a_program(mode="auto"), a_program(), a_program("faulty.py:aborts")]
    local = audit_subjects(lowerings, ALL_RULES)
    expected = [program_to_json(audit) for audit in local]
    assert any(audit.findings for audit in local)
    for executor in (
        ThreadPoolExecutor(2),
        ProcessPoolExecutor(2, mp_context=get_context("spawn")),
    ):
        with executor:
            audits = audit_subjects(lowerings, ALL_RULES, executor=executor)
        assert [program_to_json(audit) for audit in audits] == expected
        assert audits[0].timing is not None
        assert audits[0].rules == local[0].rules


@pytest.mark.slow
def test_a_module_is_looked_for_in_the_folder_of_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_steps.py").write_text((PROGRAMS / "matmul.py").read_text())
    monkeypatch.chdir(folder)
    task: Task = pickle.loads(sent_by(a_program("my_steps:build")))[1][0]
    monkeypatch.chdir(tmp_path)
    answer = run_task(dataclasses.replace(task, cached=True, cache_folder=tmp_path / "cache"))
    assert answer.audit.error is None
    assert answer.audit.module == "jit_product"
    # Another folder of the same machine may have a module of this name.
    other = dataclasses.replace(task, here=tmp_path, cached=True, cache_folder=tmp_path / "cache")
    assert "no module is called 'my_steps'" in str(run_task(other).audit.error)


def sent_by(lowering: Lowering) -> bytes:
    """The task that is made of a program, as it goes over a wire."""

    class Refusing(Executor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            sent.append(pickle.dumps((function, args)))
            raise RuntimeError

    sent: list[bytes] = []
    audits_through(Refusing(), lowering)
    return sent[0]


# -- a cluster


class Cluster:
    """A scheduler and workers, each a process of its own, in another folder than the programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        self.scheduler = self.start(
            "scheduler",
            *("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"),
            *("--scheduler-file", str(file)),
        )
        self.address: str = json.loads(wait_until(lambda: file.exists() and file.read_text()))[
            "address"
        ]

    def start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{what}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self.start(
            "worker",
            self.address,
            *("--no-nanny", "--nthreads", "1", "--no-dashboard"),
            *("--local-directory", str(self.folder)),
        )

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.stop()


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    workers = [cluster.start_worker() for _ in range(2)]
    seen = tmp_path / "seen"
    config = tmp_path / "hlo-audit.toml"
    config.write_text(
        'modes = ["auto"]\nplatform = "cpu"\nmeshes = [{ data = 2 }]\nprograms = [\n'
        f'  {{ name = "{PROGRAMS}/waits.py:build", settings = {{ seen = "{seen}" }} }},\n'
        f'  "{PROGRAMS}/matmul.py:build",\n  "{PROGRAMS}/faulty.py:aborts",\n'
        f'  "{PROGRAMS}/faulty.py:healthy",\n]\n'
    )
    check = start(
        *("check", "--config", config, "--no-cache", "--dask", cluster.address, "--format", "json")
    )
    compiler, worker = map(int, wait_until(lambda: seen.exists() and seen.read_text()).split())
    assert worker in [one.pid for one in workers]
    os.kill(worker, signal.SIGKILL)
    output, errors = check.communicate(timeout=120)
    assert check.returncode == 3, errors  # faulty.py:aborts, and nothing else
    waits, matmul, aborts, healthy = json.loads(output)["programs"]
    for program in (waits, matmul, healthy):
        assert "error" not in program, errors
    assert "crashed with SIGABRT" in aborts["error"]["message"]
    assert "these are the last words" in aborts["error"]["log"]
    wait_until(lambda: not is_running(compiler))
    (other,) = (one for one in workers if one.pid != worker)
    assert other.poll() is None  # the abort did not take it along


@pytest.mark.slow
def test_a_program_that_kills_its_workers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    cluster = Cluster(tmp_path)
    try:
        worker = cluster.start_worker()
        seen = tmp_path / "seen"
        lowering = a_program("waits.py:build", settings={"seen": str(seen)})
        with connected(cluster.address) as executor, ThreadPoolExecutor(1) as pool:
            audited = pool.submit(audit_subjects, [lowering], ALL_RULES, executor=executor)
            wait_until(lambda: seen.exists() and seen.read_text())
            worker.kill()
            (audit,) = audited.result(PATIENCE_SECONDS)
        assert isinstance(audit.error, CompileError)
        assert audit.error.message == "a dask worker has died at this program, and it was given up"
    finally:
        cluster.stop()


@pytest.mark.slow
def test_a_scheduler_that_dies_is_one_error(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_worker()
    seen = tmp_path / "seen"
    check = start(
        *("check", "waits.py:build", "--no-config", "-q", "--mesh", "data=2", "--platform", "cpu"),
        *("--set", f"seen={seen}", "--no-cache", "--dask", cluster.address),
    )
    wait_until(lambda: seen.exists() and seen.read_text())
    cluster.scheduler.kill()
    _, errors = check.communicate(timeout=120)
    assert check.returncode == 3
    gone = f"the dask scheduler at {cluster.address} has gone"
    assert errors.splitlines() == [f"hlo-audit: error: waits.py:build/auto and 1 more: {gone}"]


@pytest.mark.slow
def test_a_cluster_without_workers_is_given_up(cluster: Cluster) -> None:
    with connected(cluster.address, patience_seconds=1.5) as executor:
        audits = audit_subjects([a_program(), a_program()], ALL_RULES, executor=executor)
    for audit in audits:
        assert isinstance(audit.error, CompileError)
        assert f"the dask scheduler at {cluster.address} has no workers" in str(audit.error)
