"""Judges the rollouts of one round."""

from pathlib import Path

from grpo.errors import located
from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.tables import REWARDS, write_table
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.scoring import judge_stored, require_judged
from grpo.schema import DATA
from grpo.wiring.executors import open_executor
from grpo.wiring.judging_workers import JudgingSetup, make_judging_work
from grpo.wiring.shaping import build_shaping
from stages.entry import run, scratch_of
from stages.progress import shown, warn


def main(usage: Usage, judge: Path, prompts: Path, rollouts: Path, out: Path) -> None:
    """Writes outcome, reward and status of every rollout.

    Args:
      judge: Manifest of the judge's files, written by the stage check.
    """
    params = read_params()
    require_described(judge, params, DATA, "judge")
    scratch = scratch_of(f"score@{out.stem}", [judge, prompts, rollouts], params)
    with (
        open_executor(make_judging_work, JudgingSetup(params=params, prompts=prompts)) as executor,
        usage.part("judging"),
        shown(f"score {out.stem}") as progress,
    ):
        judged = judge_stored(
            executor,
            [rollouts],
            build_shaping(params),
            scratch=scratch.directory,
            progress=progress,
        )
    with located(f"score@{out.stem}"):
        warn(require_judged(judged.rewards))
    write_table(judged.rewards, out, REWARDS)
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="score")
