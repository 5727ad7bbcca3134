"""The version, read by the build and by ``hlo-audit --version``."""

__version__ = "0.1.0"
