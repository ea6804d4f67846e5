"""Runs a command as inference on a CPU wants it, with every cache in one directory.

Usage: run.py CACHE COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from adaptivespec_vllm.runtime import CACHE_VARIABLE, completed

cache, command = Path(sys.argv[1]), sys.argv[2:]
environment = completed(os.environ, HF_HUB_OFFLINE="1")
for name, directory in {
    "XDG_CACHE_HOME": cache,
    "XDG_CONFIG_HOME": cache / "config",
    "TORCHINDUCTOR_CACHE_DIR": cache / "torchinductor",
    CACHE_VARIABLE: cache,
}.items():
    environment.setdefault(name, str(directory))
os.execvpe(command[0], command, environment)
