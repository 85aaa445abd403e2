from plugins.my_part import my_part


def test_a_text_with_the_answer_scores_1_and_others_0():
    assert my_part(["1+1="] * 2, ["is 2", "is 3"], ["2", "2"]) == [1.0, 0.0]
