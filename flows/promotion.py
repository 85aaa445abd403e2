"""Promotions as a Prefect flow: every decision is an artifact of its run.

Import it after `flows.settings.prepare_environment`; `python -m flows.promote` does.
"""

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact

from grpo.registry.gate import Bounds
from grpo.registry.store import Decision, Registry


def _title() -> str:
    """Returns the name of a run: the model, and what is to become of it."""
    given = runtime.flow_run.parameters
    return f"{given['model']}: {given['policy'] or 'the previous champion'}"


@flow(name="promote", flow_run_name=_title, persist_result=False, validate_parameters=False)
def promote(
    model: str,
    policy: str | None = None,
    margin: float = Bounds.margin,
    family_bound: float = Bounds.family,
) -> Decision:
    """Makes a policy of the working directory's pipeline champion if it is better.

    Args:
      policy: A base or round; None: the previous champion becomes champion again.
      margin: That the gain in mean@k must exceed.
      family_bound: That a family's mean@k may fall.

    Raises:
      ParameterError: If a bound is out of range.
      ArtifactError: If MLflow cannot be reached, or has lost the champion's evaluation.
    """
    bounds = Bounds(margin=margin, family=family_bound)
    registry = Registry(model)
    decision = registry.promote(policy, bounds) if policy else registry.roll_back()
    row = {"policy": policy or "the previous champion", **vars(decision)}
    create_table_artifact([row], key="promotion", description=f"{model}: {decision.outcome}")
    return decision
