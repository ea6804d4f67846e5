"""Serves a target with its EAGLE-3 head: `vllm serve`, with the environment that inference on a CPU wants.

The variables MODEL and HEAD name the pair, directories or hub ids; without them the demo's is served. Arguments are
those of `vllm serve`, without the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from adaptivespec_vllm.runtime import completed

DEMO_NAME = "smollm2-135m-instruct"


def pair() -> tuple[str, str, list[str]]:
    """Target, head, and options that go with them."""
    model, head = os.environ.get("MODEL", ""), os.environ.get("HEAD", "")
    if bool(model) != bool(head):
        sys.exit(f"serve.py: got MODEL={model!r}, HEAD={head!r}; allowed: both, or neither for the demo's pair")
    if model:
        return model, head, []
    prepared = subprocess.run(["adaptivespec", "demo", "--prepare"], stdout=subprocess.PIPE, text=True, check=False)
    if prepared.returncode:
        sys.exit(prepared.returncode)
    paths = json.loads(prepared.stdout.splitlines()[-1])
    return paths["model"], paths["head"], ["--served-model-name", DEMO_NAME]


if __name__ == "__main__":
    target, drafter, options = pair()
    configuration = json.dumps({"method": "adaptivespec", "model": drafter})
    command = ["vllm", "serve", target, *options, "--speculative-config", configuration, *sys.argv[1:]]
    os.execvpe(command[0], command, completed(os.environ))
