from pathlib import Path

from grpo.tasks.base import TaskInputs
from plugins.my_part import MyPart


def test_prompts_are_disjoint_and_depend_on_the_seed_alone():
    task = MyPart(kind="plugins.my_part", largest=9, train_prompts=8, eval_prompts=4)
    given = TaskInputs(seed=1, data=Path("data"), warmup=None, takes_messages=False)
    tables, again = task.make_prompts(given), task.make_prompts(given)
    assert (len(tables.train), len(tables.eval)) == (8, 4)
    assert not {*tables.train["prompt"]} & {*tables.eval["prompt"]}
    assert tables.train.equals(again.train)
