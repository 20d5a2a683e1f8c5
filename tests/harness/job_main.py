"""One process of a job: runs a function of a test module, and says where it stands before the job's limit strikes."""

from __future__ import annotations

import faulthandler
import importlib
import sys

from harness.settings import BACKEND


def main(module: str, function: str, limit: float) -> None:
    faulthandler.dump_traceback_later(limit, exit=True)
    if BACKEND == "multicomm":
        importlib.import_module("multicomm")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
