"""Runs test bodies on several ranks: one pool of rank processes per module and world size.

The parts, in the order in which a test meets them: `decorate.py` turns a body into a pytest test, `pool.py`
starts the ranks and sends them the body, `rank_main.py` is the process of one rank, `rank.py` is what a body
gets to work with. `calls.py` knows every collective and its right result, `checks.py` compares tensors,
`jobs.py` launches whole jobs for the tests that need a start and an end of their own.
"""

from harness.checks import raises, same
from harness.decorate import on_ranks
from harness.rank import Group, Rank
from harness.settings import BACKEND, needs_multicomm, unless_gloo

__all__ = ["BACKEND", "Group", "Rank", "needs_multicomm", "on_ranks", "raises", "same", "unless_gloo"]
