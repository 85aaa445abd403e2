import pandas as pd

from plugins.my_part import my_part


def test_a_prompt_that_was_solved_is_sampled_less_until_it_is_not():
    step = my_part(prompts=4, chance=0.25)
    groups = pd.DataFrame({"prompt_id": ["a", "b"], "successes": [2, 1], "rollouts": [2, 2]})
    history = step.learn({}, groups)
    assert step.keep_chance(["a", "b", "c"], history).tolist() == [0.25, 1.0, 1.0]
    history = step.learn(history, groups.assign(successes=[1, 2]))
    assert step.keep_chance(["a", "b", "c"], history).tolist() == [1.0, 0.25, 1.0]
