"""Laws of promotion: what is refused and why, what is accepted, and what is left behind."""

import json
import re
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from mlflow import MlflowClient

from grpo.errors import ArtifactError, ParameterError
from grpo.lineage.lock import cached_path, read_listing
from grpo.lineage.record import tracking_uri
from grpo.registry.gate import CHALLENGER, CHAMPION, Bounds, Verdict
from grpo.registry.store import HOLDER, PREVIOUS, PROMOTED, REFUSED, ROLLED_BACK, Registry
from grpo.registry.weights import load_version
from grpo.runtime.artifacts.tables import EVALUATION, read_table, write_table
from tests import tiny_pipeline
from tests.faults import FaultLine
from tests.files import contents
from tests.registry.conftest import (
    JUDGE,
    MODEL,
    promote,
    record,
    set_remote,
    write_policy,
    write_results,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def policy_of(alias: str) -> str | None:
    version = Registry(MODEL).version(alias)
    return version and version.tags["policy"]


def decisions() -> list[dict[str, str]]:
    """Returns the tags of every decision's run, newest first."""
    client = MlflowClient(tracking_uri=tracking_uri(Path()))
    found = client.get_experiment_by_name("grpo")
    assert found is not None
    return [run.data.tags for run in client.search_runs([found.experiment_id])]


def nothing(root: Path) -> None:
    """Leaves the workspace as it is."""


def retrain(root: Path) -> None:
    write_policy(root, "best-1", 9.0)
    record(root, "train@best-1")


def remake_base(root: Path) -> None:
    write_policy(root, "base", 9.0)
    record(root, "base")


def remake_base_and_evaluate(root: Path) -> None:
    remake_base(root)
    record(root, "evaluate@best-1")


def change_weights(root: Path) -> None:
    write_policy(root, "best-1", 9.0)


def change_results(root: Path) -> None:
    write_results(root, "best-1", 4, 4)


def leave_uncommitted(root: Path) -> None:
    retrain(root)
    record(root, "evaluate@best-1")


def evaluate_otherwise(root: Path) -> None:
    tiny_pipeline.replace(root, "rollouts: 4", "rollouts: 8")
    record(root, "evaluate@best-1")
    tiny_pipeline.commit(root, "more rollouts")


def change_the_judge(root: Path) -> None:
    """A part of one's own, whose file has changed."""
    (root / JUDGE).write_text("another judge")
    record(root, "check")
    record(root, "evaluate@best-1")
    tiny_pipeline.commit(root, "another judge")


def evaluate_on_fewer(root: Path) -> None:
    """The table loses prompts, though the stage read the same ones."""
    path = root / "artifacts/evaluations/best-1.parquet"
    write_table(read_table(path, EVALUATION).head(30), path, EVALUATION)
    record(root, "evaluate@best-1")
    tiny_pipeline.commit(root, "fewer prompts")


def lose_lock(root: Path) -> None:
    (root / "dvc.lock").unlink()


REFUSALS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no stage made it": ("nothing-1", nothing, r"nothing-1: its lineage is missing"),
    "no record at all": ("best-1", lose_lock, r"its lineage is missing: .*dvc\.lock"),
    "the champion itself": ("good-1", nothing, r"is the champion already: version 1"),
    "a tie": ("same-1", nothing, r"gains \+0\.000 \[\+0\.000, \+0\.000\] in mean@k, not beyond 0 "),
    "worse": ("worse-1", nothing, r"gains -0\.200 \["),
    "a family lost": ("narrow-1", nothing, r"loses 0\.500 in mean@k on words, more than 0\.1"),
    "a pickle": ("unsafe-1", nothing, r"optimizer\.pt: may hold a pickle"),
    "a stale evaluation": ("best-1", retrain, r"evaluate@best-1: is stale, .*best-1 has changed"),
    "another base": ("best-1", remake_base, r"evaluate@best-1: is stale, .*base has changed"),
    "a broken lineage": (
        "best-1",
        remake_base_and_evaluate,
        r"policies/best-1: its lineage is broken, artifacts/policies/base has changed",
    ),
    "other weights": ("best-1", change_weights, r"policies/best-1: differs from dvc\.lock"),
    "other results": ("best-1", change_results, r"best-1\.parquet: differs from dvc\.lock"),
    "nothing committed": ("best-1", leave_uncommitted, r"changes that are not committed"),
    "another evaluation": ("best-1", evaluate_otherwise, r"are not those of the champion's"),
    "another judge": ("best-1", change_the_judge, r"are not those of the champion's"),
    "fewer prompts": ("best-1", evaluate_on_fewer, r"was evaluated on other prompts"),
}
RARE = (
    *("no stage made it", "no record at all", "another base", "a broken lineage", "other results"),
    *("another evaluation", "fewer prompts"),
)


@pytest.mark.parametrize(
    "name",
    [each if each not in RARE else pytest.param(each, marks=pytest.mark.long) for each in REFUSALS],
)
def test_a_refused_promotion_says_why_and_changes_no_champion(workspace: Path, name: str):
    policy, spoil, reason = REFUSALS[name]
    spoil(workspace)
    outcome, said = promote(workspace, policy)
    assert outcome == REFUSED
    assert re.search(reason, said), said
    assert "\n" not in said
    assert policy_of(CHAMPION) == "good-1"
    assert policy_of(PREVIOUS) is None
    assert {"decision": REFUSED, "reason": said}.items() <= decisions()[0].items()


def test_a_better_policy_becomes_champion_and_the_old_one_previous(workspace: Path):
    assert promote(workspace, "same-1")[0] == REFUSED
    assert policy_of(CHALLENGER) == "same-1"
    outcome, said = promote(workspace, "best-1")
    assert (outcome, said) == (PROMOTED, "gains +0.250 [+0.250, +0.250] over version 1")
    assert [policy_of(each) for each in (CHAMPION, PREVIOUS)] == ["best-1", "good-1"]
    assert policy_of(CHALLENGER) is None
    version = Registry(MODEL).version(CHAMPION)
    assert version is not None
    commit = tiny_pipeline.run(workspace, "git", "rev-parse", "HEAD").strip()
    assert version.tags["git_revision"] == commit
    assert {"decision": PROMOTED, "reason": said}.items() <= decisions()[0].items()


def histories() -> dict[str, list[str]]:
    """Returns what became of each version, by its number, without times and runs."""
    registry = Registry(MODEL)
    found: dict[str, list[str]] = {}
    while version := registry.version(str(len(found) + 1)):
        entries = registry.history(version)
        assert all(re.fullmatch(r"\S+ \S+ UTC .+ \(run \w{32}\)", each) for each in entries)
        found[str(version.version)] = [each[24:-39] for each in entries]
    return found


def test_decisions_are_a_history_and_the_aliases_say_what_is_live(workspace: Path):
    """Nothing is taken back, and of the version that is live no history ends in its end."""
    registry = Registry(MODEL)
    before = histories()
    assert [len(each) for each in before.values()] == [1]
    acts = [
        lambda: registry.promote("same-1", Bounds()),  # version 2
        lambda: registry.promote("best-1", Bounds()),  # version 3
        registry.roll_back,
        registry.roll_back,  # nowhere to
        lambda: registry.promote("best-1", Bounds()),  # version 4
        registry.roll_back,
    ]
    for number, act in enumerate(acts):
        decision = act()
        now = histories()
        assert all(now[each][: len(entries)] == entries for each, entries in before.items())
        grown = sum(map(len, now.values())) - sum(map(len, before.values()))
        assert grown == (1, 2, 2, 0, 2, 2)[number]
        champion = registry.version(CHAMPION)
        assert champion is not None
        ends = {each: entries[-1].split(":")[0] for each, entries in now.items()}
        assert ends.pop(str(champion.version)) in (PROMOTED, ROLLED_BACK)
        assert set(ends.values()) <= {REFUSED, "replaced", "withdrawn"}
        if decision.version:
            assert now[decision.version][-1] == f"{decision.outcome}: {decision.reason}"
        before = now
    assert before["1"][1:] == [
        "replaced: by version 3",
        "rolled back: champion again, in place of version 3",
        "replaced: by version 4",
        "rolled back: champion again, in place of version 4",
    ]
    assert before["4"][1:] == ["withdrawn: rolled back to version 1"]


def test_a_champion_is_promoted_again_with_another_evaluation(workspace: Path):
    """Then the next policy is compared with it."""
    change_the_judge(workspace)
    assert promote(workspace, "best-1")[0] == REFUSED
    record(workspace, "evaluate@good-1")
    tiny_pipeline.commit(workspace, "the champion by another judge")
    registry = Registry(MODEL)
    champion = registry.version(CHAMPION)
    assert champion is not None
    # As a killed promotion of another policy leaves it: a rollback would change no weights.
    registry.client.set_registered_model_alias(MODEL, PREVIOUS, champion.version)
    assert promote(workspace, "good-1")[0] == PROMOTED
    assert [policy_of(each) for each in (CHAMPION, PREVIOUS)] == ["good-1", None]
    assert registry.roll_back().outcome == REFUSED
    assert "is the champion already" in promote(workspace, "good-1")[1]
    assert promote(workspace, "best-1")[0] == PROMOTED
    assert registry.roll_back().outcome == ROLLED_BACK
    assert policy_of(CHAMPION) == "good-1"


def test_a_champion_is_not_promoted_again_with_too_few_prompts(workspace: Path):
    path = workspace / "artifacts/evaluations/good-1.parquet"
    write_table(read_table(path, EVALUATION).head(5), path, EVALUATION)
    change_the_judge(workspace)
    record(workspace, "evaluate@good-1")
    tiny_pipeline.commit(workspace, "the champion on five prompts")
    outcome, said = promote(workspace, "good-1")
    assert (outcome, said.partition(";")[0]) == (
        REFUSED,
        "was evaluated on 5 prompts, fewer than the 6 that a comparison needs",
    )


def test_a_champion_can_be_loaded_where_it_was_not_made(workspace: Path, tmp_path: Path):
    assert promote(workspace, "best-1")[0] == PROMOTED
    tiny_pipeline.run(workspace, "rm", "-rf", ".dvc/cache")
    after = loaded(CHAMPION, tmp_path / "loaded")
    made = contents(workspace / "artifacts/policies/best-1")
    assert {f"policy/{name}": content for name, content in made.items()}.items() <= after.items()


def no_remote(root: Path) -> None:
    (root / ".dvc/config").write_text("[core]\n    analytics = false\n")
    tiny_pipeline.commit(root, "no remote")


def remote_is_a_file(root: Path) -> None:
    (root.parent / "file").write_text("no directory")
    set_remote(root, url=str(root.parent / "file"))


def no_such_bucket(root: Path) -> None:
    set_remote(
        root,
        url="s3://nowhere/dvc",
        endpointurl="http://127.0.0.1:1",
        allow_anonymous_login="true",
    )


def lose_cache(root: Path) -> None:
    tiny_pipeline.run(root, "rm", "-rf", ".dvc/cache")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_remote, r"core\.remote must name where to push; run dvc remote add"),
        (remote_is_a_file, r"DVC's remote \(\.dvc/config\): cannot store the policy"),
        pytest.param(
            no_such_bucket,
            r"DVC's remote \(\.dvc/config\): cannot store the policy",
            marks=pytest.mark.long,
        ),
        (lose_cache, r"DVC's cache, is missing; run dvc commit"),
    ],
)
def test_a_policy_that_cannot_be_pushed_does_not_become_champion(
    workspace: Path, spoil: Callable[[Path], None], reason: str
):
    spoil(workspace)
    outcome, said = promote(workspace, "best-1")
    assert (outcome, policy_of(CHAMPION)) == (REFUSED, "good-1")
    assert re.search(rf"^version 2 is only on this disk: .*{reason}", said), said
    assert "\n" not in said
    assert histories()["2"] == [f"{REFUSED}: {said}"]


def test_a_gain_must_lie_above_the_margin_and_a_family_may_lose_its_bound(workspace: Path):
    assert promote(workspace, "best-1", (0.25, 0.1))[0] == REFUSED
    assert promote(workspace, "narrow-1", (0.0, 0.5))[0] == PROMOTED
    with pytest.raises(ParameterError, match=r"margin must be in \[0, 1\) .* got 1\.0"):
        Bounds(margin=1.0)


def test_the_first_champion_must_beat_its_base(workspace: Path):
    registry = Registry("another")
    assert registry.promote("worse-1", Bounds()).outcome == REFUSED
    decision = registry.promote("good-1", Bounds())
    assert (decision.outcome, decision.version) == (PROMOTED, "2")
    assert decision.reason.endswith("over its base")


def loaded(alias: str, target: Path) -> dict[str, bytes]:
    """Returns what is loaded, by name."""
    load_version(f"models:/{MODEL}@{alias}", target)
    return contents(target)


def test_a_rollback_restores_the_exact_bytes(workspace: Path, tmp_path: Path):
    before = loaded(CHAMPION, tmp_path / "before")
    assert {
        name.removeprefix("policy/"): content
        for name, content in before.items()
        if name.startswith("policy/")
    } == contents(workspace / "artifacts/policies/good-1")
    promote(workspace, "best-1")
    assert loaded(CHAMPION, tmp_path / "new") != before
    decision = Registry(MODEL).roll_back()
    assert (decision.outcome, decision.reason) == (
        ROLLED_BACK,
        "champion again, in place of version 2",
    )
    assert loaded(CHAMPION, tmp_path / "after") == before
    again = Registry(MODEL).roll_back()
    assert (again.outcome, again.reason) == (REFUSED, "there is no previous champion")
    # What was rolled back can be promoted again.
    assert promote(workspace, "best-1")[0] == PROMOTED


def test_while_a_promotion_runs_another_is_refused(workspace: Path):
    registry = Registry(MODEL)
    with registry._alone("its run"):
        outcome, said = promote(workspace, "best-1")
    assert (outcome, said) == (REFUSED, "another promotion of the model is running")
    assert promote(workspace, "best-1")[0] == PROMOTED


def test_a_promotion_on_another_host_is_waited_for_until_it_must_be_dead(workspace: Path):
    client = Registry(MODEL).client

    def held(until: float, host: str) -> None:
        holder = json.dumps({"run": "theirs", "host": host, "until": until})
        client.set_registered_model_tag(MODEL, HOLDER, holder)

    for ahead_seconds in (60, 86400):  # the other clock may be a day ahead
        held(time.time() + ahead_seconds, "elsewhere")
        outcome, said = promote(workspace, "best-1")
        assert (outcome, said) == (
            REFUSED,
            "another promotion of the model is running: run theirs; "
            "if its host elsewhere is gone, delete the model's tag promotion.holder",
        )
    held(time.time() - 1, "elsewhere")
    assert promote(workspace, "best-1")[0] == PROMOTED


def test_a_promotion_that_was_taken_for_dead_changes_no_champion(workspace: Path):
    """As one on a host whose clock is behind, seen from one whose clock is right."""
    slow = Registry(MODEL)
    champion, version = slow.version(CHAMPION), slow.version("1")
    assert promote(workspace, "best-1")[0] == PROMOTED
    assert version is not None
    outcome = slow._make_champion(version, champion, Verdict(difference=None, reason=""))
    assert outcome[:2] == (REFUSED, "another promotion has changed the champion")
    assert policy_of(CHAMPION) == "best-1"


@pytest.mark.fault
def test_of_two_promotions_at_once_one_is_accepted(workspace: Path, fault: FaultLine):
    before = contents(workspace / "artifacts/policies")
    with get_context("fork").Pool(2) as pool:
        outcomes = pool.starmap(promote, [(workspace, "best-1")] * 2, chunksize=1)
        # Leaving ends workers by SIGTERM, for which an earlier test may have left a handler.
        pool.close()
        pool.join()
    with fault.recovery():
        again = promote(workspace, "best-1")
    assert sorted(outcome for outcome, _ in outcomes) == [PROMOTED, REFUSED]
    assert again == (REFUSED, "is the champion already: version 2")
    assert [policy_of(each) for each in (CHAMPION, PREVIOUS)] == ["best-1", "good-1"]
    after = contents(workspace / "artifacts/policies")
    fault.tell(
        "two promotions of a model at once",
        "one was accepted; the other was refused and said why, exit code 1",
        lost=[name for name, content in before.items() if after.get(name) != content],
    )


def test_a_promotion_killed_between_two_aliases_is_made_again(workspace: Path):
    registry = Registry(MODEL)
    champion = registry.version(CHAMPION)
    assert champion is not None
    registry.client.set_registered_model_alias(MODEL, PREVIOUS, champion.version)
    registry._take("a killed run")
    assert registry.roll_back().outcome == REFUSED
    assert promote(workspace, "best-1")[0] == PROMOTED
    assert [policy_of(each) for each in (CHAMPION, PREVIOUS)] == ["best-1", "good-1"]


def damage(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"damaged")


def test_content_that_is_damaged_or_lost_is_never_loaded(workspace: Path, tmp_path: Path):
    version = Registry(MODEL).version(CHAMPION)
    assert version is not None
    digest = version.tags["policy_digest"]
    listing = read_listing(workspace, digest)
    assert listing is not None
    weights = cached_path(workspace, listing["model.safetensors"])
    whole = weights.read_bytes()
    damage(weights)
    with pytest.raises(ArtifactError, match=r"is damaged, its content must have the hash"):
        loaded(CHAMPION, tmp_path / "loaded")
    weights.unlink()
    set_remote(workspace, url=str(tmp_path / "empty"))
    with pytest.raises(ArtifactError, match=r"neither DVC's cache nor its remote holds it"):
        loaded(CHAMPION, tmp_path / "loaded")
    weights.write_bytes(whole)
    damage(cached_path(workspace, digest))
    with pytest.raises(ArtifactError, match=r"is damaged, its content must have the hash"):
        loaded(CHAMPION, tmp_path / "loaded")
    assert not (tmp_path / "loaded").exists()


def test_loading_replaces_nothing_but_an_earlier_load(workspace: Path, tmp_path: Path):
    target = tmp_path / "loaded"
    first = loaded("1", target)
    assert promote(workspace, "best-1")[0] == PROMOTED
    second = loaded("2", target)
    assert second != first
    (target / "notes.txt").write_text("what I found")
    with pytest.raises(ArtifactError, match=r"loaded: must be free or an unchanged output"):
        loaded("1", target)
    assert contents(target) == {**second, "notes.txt": b"what I found"}


def test_content_comes_from_the_remote_if_the_cache_has_none(workspace: Path, tmp_path: Path):
    before = loaded(CHAMPION, tmp_path / "before")
    tiny_pipeline.run(workspace, "rm", "-rf", ".dvc/cache")
    assert loaded(CHAMPION, tmp_path / "after") == before


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("solver@champion", "must be models:/NAME@ALIAS"),
        ("models:/solver", "must be models:/NAME@ALIAS"),
        ("models:/solver@best", "no such version"),
        ("models:/solver/7", "no such version"),
        ("models:/nobody@champion", "no such version"),
    ],
)
def test_an_address_of_no_version_is_refused(
    workspace: Path, tmp_path: Path, address: str, message: str
):
    with pytest.raises(ParameterError, match=message):
        load_version(address, tmp_path / "loaded")
