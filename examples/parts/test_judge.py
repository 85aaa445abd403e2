from plugins.my_part import my_part


def test_a_text_or_message_with_the_answer_scores_1_and_others_0():
    texts = ["is 2", "is 3"]
    messages = [[{"role": "assistant", "content": each}] for each in texts]
    for completions in (texts, messages):
        assert my_part(["1+1="] * 2, completions, ["2", "2"]) == [1.0, 0.0]
