"""`kgen doctor`: checks that this machine can compile, and says what to do where it cannot."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kgen.commands import doctor
from kgen.commands.exit_codes import OK, WRONG

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    found = list(doctor.checks()) if options.json else []
    if options.json:
        ready = not any(check.status == doctor.BAD for check in found)
        print(json.dumps({"ready": ready, "checks": [asdict(check) for check in found]}, indent=1))
        return OK if ready else WRONG
    bad = 0
    for check in doctor.checks():
        print(f"{check.status:<4}  {check.name}: {check.found}", flush=True)
        if check.advice:
            print(f"      {check.advice}")
        bad += check.status == doctor.BAD
    print("this machine is ready" if not bad else f"{bad} of the checks failed")
    return WRONG if bad else OK
