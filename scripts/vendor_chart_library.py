"""Write ``hlo_audit/report/html/vendor/`` anew: the chart library of the HTML report.

Downloads the pinned packages from the npm registry, checks the archives against the hashes that the
registry published for these versions, and keeps the minified bundles and the licences, unchanged.
``--check`` writes nothing and fails where a kept file is not the one pinned; it needs no network.

For a new version: change ``PACKAGES`` (``npm view NAME@VERSION dist.integrity``), run this, run the
tests, and look at a report.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import urllib.request
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "hlo_audit" / "report" / "html" / "vendor"
REGISTRY = "https://registry.npmjs.org"

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Package:
    """A package of the npm registry.

    Attributes:
        integrity: of its archive, as the registry publishes it (subresource integrity).
        files: path in the package -> the name that it is kept under, and its SHA-256.
    """

    name: str
    version: str
    integrity: str
    files: dict[str, tuple[str, str]]

    @property
    def url(self) -> str:
        return f"{REGISTRY}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


PACKAGES = (
    Package(
        "d3",
        "7.9.2",
        "sha512-ZKb/mONPVKzaO5UlcWcwN8bS4ezvQaYu+bsou+XgNABdGC800kwH651ADTbbTxMPHW13UlvbQafdmJQDk1w7Mg==",
        {
            "dist/d3.min.js": (
                "d3.min.js",
                "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
            ),
            "LICENSE": (
                "d3.LICENSE",
                "2a6d2d5f32ba0b755ddbc1c833f766e30cdbe6ebe9a6d4e3e24427721f0b63d3",
            ),
        },
    ),
    Package(
        "@observablehq/plot",
        "0.6.17",
        "sha512-/qaXP/7mc4MUS0s4cPPFASDRjtsWp85/TbfsciqDgU1HwYixbSbbytNuInD8AcTYC3xaxACgVX06agdfQy9W+g==",
        {
            "dist/plot.umd.min.js": (
                "plot.umd.min.js",
                "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
            ),
            "LICENSE": (
                "plot.LICENSE",
                "4b295e011e0e046170041b5b46f1349393aeceb95797793a55bd21dbb543363a",
            ),
        },
    ),
    # What the two bundles hold under terms or of authors of its own.
    Package(
        "binary-search-bounds",
        "2.0.5",
        "sha512-H0ea4Fd3lS1+sTEB2TgcLoK21lLhwEJzlQv3IN47pJS976Gx4zoWe0ak3q+uYh60ppQxg9F16Ri4tS1sfD4+jA==",
        {
            "LICENSE": (
                "binary-search-bounds.LICENSE",
                "f2b10f2958d2724d6df0f16b1ea25d32cd7e6333ce88ac3c5cdff37c2c4222b8",
            )
        },
    ),
    Package(
        "d3-ease",
        "3.0.2",
        "sha512-B5znKqRmKROAN4oHWQ50W/qisVjA9GXh2WMsVKdFVp4DxWmcrOsweqgUOUVsv5th96kwaZlokU6SlV4J3gak1w==",
        {
            "LICENSE": (
                "d3-ease.LICENSE",
                "82f2a38e51f9013690c0cea086e901b33e51b5f0c3ba837941d7a58073c72917",
            )
        },
    ),
    Package(
        "d3-geo",
        "3.1.2",
        "sha512-5R8ZgDQorIxmauv7R6gpE/ndz+Z0qAZssigq0aXFdvPHdY41RqtW02jrRUQAL724NdPABYXo1+gQEGBBr7uKNg==",
        {
            "LICENSE": (
                "d3-geo.LICENSE",
                "3ded44a2c7935c8f5236f0543069406fdf7256b61b9eaeaddd007e80f19bc959",
            )
        },
    ),
    Package(
        "d3-scale-chromatic",
        "3.1.1",
        "sha512-lA5gfN2yMvmChubmptnDiBfeGpHD7Yb1EbvCz0TZE0WHXhyR6W2allPuhKtzV5ILQRqeOdefF0qYtERReLUBDg==",
        {
            "LICENSE": (
                "d3-scale-chromatic.LICENSE",
                "667e7fd523c85aefbe152167ae59d6cdc0f944720c11d1f17ecef8783d1dcb9b",
            )
        },
    ),
    Package(
        "delaunator",
        "5.1.0",
        "sha512-AGrQ4QSgssa1NGmWmLPqN5NY2KajF5MqxetNEO+o0n3ZwZZeTmt7bBnvzHWrmkZFxGgr4HdyFgelzgi06otLuQ==",
        {
            "LICENSE": (
                "delaunator.LICENSE",
                "0b348fff56384b43dbb37593906904e56d0f9deb51eae590d4dc6d427fbf1808",
            )
        },
    ),
    Package(
        "interval-tree-1d",
        "1.0.4",
        "sha512-wY8QJH+6wNI0uh4pDQzMvl+478Qh7Rl4qLmqiluxALlNvl+I+o5x38Pw3/z7mDPTPS1dQalZJXsmbvxx5gclhQ==",
        {
            "LICENSE": (
                "interval-tree-1d.LICENSE",
                "e67aed7df22dc8031e4fcf5338fe91cb33e3817e5c58a99a2a2802eea9069791",
            )
        },
    ),
    Package(
        "isoformat",
        "0.2.1",
        "sha512-tFLRAygk9NqrRPhJSnNGh7g7oaVWDwR0wKh/GM2LgmPa50Eg4UfyaCO4I8k6EqJHl1/uh2RAD6g06n5ygEnrjQ==",
        {
            "LICENSE": (
                "isoformat.LICENSE",
                "9ea8903938dab5f12c4572d60725069bec2d1b0dc3bcc210b09bae946a5ebb1f",
            )
        },
    ),
)


def download(package: Package) -> dict[str, bytes]:
    """The files of a package to keep, by the names that they are kept under.

    Raises:
        SystemExit: where the archive or a file is not the one pinned.
    """
    with urllib.request.urlopen(package.url, timeout=60) as answer:
        archive = answer.read(_MOST_BYTES)
    algorithm, _, _ = package.integrity.partition("-")
    digest = b64encode(hashlib.new(algorithm, archive).digest()).decode()
    if f"{algorithm}-{digest}" != package.integrity:
        sys.exit(f"{package.url} is not the archive that is pinned: {algorithm}-{digest}")
    kept = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for path, (name, sha256) in package.files.items():
            file = files.extractfile(f"package/{path}")
            assert file is not None
            kept[name] = file.read()
            found = hashlib.sha256(kept[name]).hexdigest()
            if found != sha256:
                sys.exit(f"{path} of {package.name} is not the file that is pinned: {found}")
    return kept


def wrong_files() -> list[str]:
    """What of the kept files is missing, is not the one pinned, or should not be there."""
    pinned = {name: sha for package in PACKAGES for name, sha in package.files.values()}
    there = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    return [
        name
        for name in sorted({*pinned, *there})
        if name not in there or hashlib.sha256(there[name]).hexdigest() != pinned.get(name)
    ]


def main() -> None:
    """Download the files, or check those that are kept."""
    if sys.argv[1:] == ["--check"]:
        wrong = wrong_files()
        sys.exit(f"not as pinned: {', '.join(wrong)}" if wrong else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        for name, content in download(package).items():
            (FOLDER / name).write_bytes(content)
            print(f"{name}  {package.name} {package.version}  {len(content):,} bytes")


if __name__ == "__main__":
    main()
