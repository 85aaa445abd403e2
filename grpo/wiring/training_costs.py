"""What an arm's objective makes training cost, for the stages that do not build objectives."""

from typing import Any

from grpo.objective.penalty import scores_reference_of_all, scores_reference_of_kept
from grpo.params.parameters import Parameters
from grpo.wiring.objectives import build_objective


def training_costs(params: Parameters, arm: str) -> dict[str, Any]:
    """Returns what `build_price` reads."""
    settings = params.find_arm(arm)
    links = build_objective(settings.objective, arm).links
    keeps = [int(each.settings["keep"] or 0) for each in links if "keep" in each.settings]
    return {
        "keep": min(keeps, default=None),
        "drops_uniform": any(link.name == "drop_uniform_groups" for link in links),
        "penalizes_loss": scores_reference_of_kept(links),
        "penalizes_reward": scores_reference_of_all(links),
        "passes": settings.training.passes_per_iteration,
        "optimizer_steps_per_iteration": settings.training.optimizer_steps_per_iteration,
    }
