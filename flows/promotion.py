"""Promotions and rollbacks as Prefect flows; the decision is the run's state and an artifact.

Import it after `flows.settings.prepare_environment`; `python -m flows.promote` does.
"""

from prefect import State, flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed

from grpo.errors import ParameterError
from grpo.registry.gate import Bounds
from grpo.registry.store import PROMOTED, REFUSED, ROLLED_BACK, Decision, Registry

STATES = {PROMOTED: "Promoted", REFUSED: "Refused", ROLLED_BACK: "RolledBack"}


def _title() -> str:
    """Returns the name of a promotion's flow run: the model and the policy."""
    given = runtime.flow_run.parameters
    return f"{given['model']}: {given['policy']}"


def _title_of_rollback() -> str:
    return f"{runtime.flow_run.parameters['model']}: the previous champion"


@flow(name="promote", flow_run_name=_title, persist_result=False, validate_parameters=False)
def promote(
    model: str, policy: str, margin: float = Bounds.margin, family_bound: float = Bounds.family
) -> State:
    """Makes a policy of the working directory's pipeline champion if it passes the gate.

    A refused promotion ends in the state Refused, of Prefect's type FAILED.

    Args:
      policy: A base or round.
      margin: Minimum gain in mean@k.
      family_bound: Maximum loss in mean@k of a prompt family.

    Raises:
      ParameterError: If no policy is named, or a bound is out of range.
      ArtifactError: If MLflow is unreachable, or the champion's evaluation is lost.
    """
    if not policy:
        raise ParameterError(
            f"policy: must name a base or a round, got {policy!r}; to go back to the previous "
            "champion run the flow rollback"
        )
    bounds = Bounds(margin=margin, family=family_bound)
    return _shown(policy, Registry(model).promote(policy, bounds))


@flow(
    name="rollback",
    flow_run_name=_title_of_rollback,
    persist_result=False,
    validate_parameters=False,
)
def roll_back(model: str) -> State:
    """Makes the previous champion champion again.

    Raises:
      ArtifactError: If MLflow is unreachable.
    """
    return _shown("the previous champion", Registry(model).roll_back())


def _shown(policy: str, decision: Decision) -> State:
    """Stores a decision as an artifact and returns it as a Prefect state."""
    row = {"policy": policy, **vars(decision)}
    description = f"{decision.model}: {decision.outcome}"
    create_table_artifact([row], key="promotion", description=description)
    version = f"version {decision.version} of " if decision.version else ""
    make = Failed if decision.outcome == REFUSED else Completed
    return make(
        name=STATES[decision.outcome], message=f"{version}{decision.model}: {decision.reason}"
    )
