"""A new planner: from a chain to a ``Plan``, judged by a simulator that knows no planner.

"Halving": segments of L/2, L/4, ..., 1 stages. The long segment comes first, where nothing else is
held while it runs backward; the exponential spacing has it last.
"""

from __future__ import annotations

from analysis.checkpointing import Chain, Plan, exponential, simulate, sqrt, store_all, uniform_chain
from analysis.checkpointing.plan_tree import PlanBuilder, plan_of


def halving(chain: Chain) -> Plan:
    """Keep the inputs of segments that halve in length; run each again in its turn."""
    starts, left = [1], len(chain)
    while left > 1:
        starts.append(starts[-1] + left - left // 2)
        left //= 2
    build = PlanBuilder(chain)
    return plan_of("halving", build, build.segments(starts, len(chain)))


def main() -> None:
    """Beside the planners of the package, replayed."""
    chain = uniform_chain(64, activation_bytes=1 << 20)
    for planner in (store_all, halving, exponential, sqrt):
        plan = planner(chain)
        replay = simulate(chain, plan.schedule)  # raises at the first action that cannot be
        assert (replay.peak_bytes, replay.forwards) == (plan.peak_bytes, plan.forwards)
        print(f"{plan.name:12} peak {replay.peak_bytes >> 20:3} MiB, {replay.forwards} forward runs")


if __name__ == "__main__":
    main()
