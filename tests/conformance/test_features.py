"""The suite leaves out no option: those of the package's table are those of its rows."""

from __future__ import annotations

from attention_case import call_of, problem_of
from features import FEATURES, small

from analysis.features import FEATURES as TABLE
from analysis.features import features_of

#: In ``test_algorithms.py``: the operator's callers ask for it by using lse.
ELSEWHERE = {"lse_gradient"}
#: In the forms of ``test_results.py``.
IN_THE_FORMS = {"causal"}


def test_every_option_has_a_row() -> None:
    found: set[str] = set()
    for feature in FEATURES:
        case = small(feature)
        found |= features_of(problem_of(case, call_of(case).masks))
    assert found | ELSEWHERE | IN_THE_FORMS == set(TABLE)
