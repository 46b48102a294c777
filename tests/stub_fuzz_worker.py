"""A process that a GPU ends: in place of `fuzz_contractions.worker`, without torch. Candidate b kills it, c never ends."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def serve() -> None:
    say(started=True)
    for line in sys.stdin:
        skip = json.loads(line)["skip"]
        say(begin="preparing", candidate="the problem")
        for name in (n for n in "abcd" if n not in skip):
            say(begin="compiling", candidate=name)
            say(begin="running", candidate=name)
            if name == "b":
                os._exit(9)
            if name == "c":
                time.sleep(60)
            say(result={"candidate": name, "outcome": "right", "text": "", "templates": []})
        say(done=True)


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
