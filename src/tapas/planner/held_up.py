"""Plans that the host holds up: what the search has no price for."""

from collections.abc import Mapping
from dataclasses import replace

from tapas.plan.plan import Plan
from tapas.plan.simulate import simulate
from tapas.planner.describe import assemble
from tapas.planner.solution import Solution

MUCH = 0.05  # of a simulated step


def held_up(plan: Plan, strategies: Mapping[str, Solution]) -> list[str]:
    """A sentence where the simulated step waits for the host that launches operators, and whether a known strategy is
    faster so: the search prices what devices do."""
    step = simulate(plan)
    if step is None or step.held <= MUCH * step.seconds:
        return []
    part = f"{step.held / step.seconds:.0%} of the simulated step"
    fact = f"the host launches operators too slowly, which holds up {part} and is no part of what is proven"
    times = {name: simulate(replace(assemble(found, {}), source=plan.source)) for name, found in strategies.items()}
    faster = {name: other.seconds for name, other in times.items() if other and other.seconds < step.seconds}
    if faster:
        name = min(faster, key=lambda name: faster[name])
        fact += f"; with the host {name} takes {1 - faster[name] / step.seconds:.1%} less: --pin '*={name}'"
    remedy = "" if plan.source.get("compile") else ", or --compile" if faster else "; --compile has less to launch"
    return [fact + remedy]
