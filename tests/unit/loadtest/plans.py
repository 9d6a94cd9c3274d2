"""Plans for tests: every option at its default but the named ones."""

import argparse

from attention_load.plan import OPTIONS, Plan


def plan(**changes) -> Plan:
    return Plan.read(argparse.Namespace(**{name: default for name, _, default, _ in OPTIONS} | changes))
