"""A link of the objective: say here what it changes."""

from dataclasses import replace

from torch import Generator

from grpo import Credit, Link, Objective, Rollouts, credit_link


def my_part(factor: float) -> Objective:
    """Multiplies negative advantages by `factor`: below 1, failures push less."""

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        scaled = before.advantage.where(before.advantage > 0, factor * before.advantage)
        return replace(before, advantage=scaled)

    return credit_link(Link("my_part", {"factor": factor}), credit)
