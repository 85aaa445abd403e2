"""What an arm's objective makes training cost, for the stages that do not build objectives."""

from typing import Any

from grpo.params.parameters import Parameters
from grpo.wiring.objectives import build_objective


def training_costs(params: Parameters, arm: str) -> dict[str, Any]:
    """Returns what `build_price` reads."""
    settings = params.find_arm(arm)
    links = build_objective(settings.objective, arm).links
    named = {link.name: link.settings for link in links}
    keeps = [int(each.settings["keep"] or 0) for each in links if "keep" in each.settings]
    active = {name for name, each in named.items() if each.get("beta")}
    return {
        "keep": min(keeps, default=None),
        "drops_uniform": "drop_uniform_groups" in named,
        "penalizes_loss": "penalize_kl" in active,
        "penalizes_reward": "subtract_kl_from_reward" in active,
        "passes": settings.training.passes_per_iteration,
        "optimizer_steps_per_iteration": settings.training.optimizer_steps_per_iteration,
    }
