"""Errors of ranks in the process that started them."""

from pathlib import Path

import pytest

from grpo.errors import ArtifactError, GrpoError, RetryableError, ServerError
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.ranks import run_in_ranks


@pytest.mark.parametrize("error", [ArtifactError, ServerError])
def test_an_error_of_a_rank_says_whether_a_rerun_may_succeed(
    error: type[GrpoError], tmp_path: Path
):
    def work(usage: Usage) -> None:
        raise error("the reason")

    with pytest.raises(GrpoError, match="the reason") as raised:
        run_in_ranks(2, work, Usage(), store=tmp_path / "store")
    assert isinstance(raised.value, RetryableError) == (error is ServerError)


def test_ranks_may_have_more_to_say_than_a_pipe_holds(tmp_path: Path):
    usage, spans = Usage(), [["update", 0.5, 0.25]] * 5000

    def work(of_rank: Usage) -> None:
        of_rank.spans += spans

    run_in_ranks(2, work, usage, store=tmp_path / "store")
    assert usage.spans == spans
