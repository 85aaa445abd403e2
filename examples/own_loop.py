"""Your own PyTorch loop with DAPO's objective: a small GPT-2 learns to sort three digits."""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import grpo

DIGITS, LENGTH, PROMPTS, ROLLOUTS_PER_GROUP, UPDATES = 4, 3, 16, 8, 150
MODEL = {"vocab_size": DIGITS, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 2 * LENGTH}
SAMPLING = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "output_logits": True}


def sample(model: GPT2LMHeadModel, prompts: Tensor) -> tuple[Tensor, Tensor]:
    out = model.generate(prompts, return_dict_in_generate=True, **SAMPLING)
    logp = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    return out.sequences, logp  # prompt and answer; log-prob of each token of the answer


def log_prob(model: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits[:, LENGTH - 1 : -1].log_softmax(dim=-1)
    return logits.gather(2, tokens[:, LENGTH:, None])[:, :, 0]


def train(seed: int = 0, num_updates: int = UPDATES) -> tuple[list[float], list[int]]:
    """Returns, for each update, the mean reward and the number of rollouts forwarded."""
    torch.manual_seed(seed)
    config = GPT2Config(**MODEL, bos_token_id=None, eos_token_id=None, initializer_range=0.1)
    model = GPT2LMHeadModel(config).eval()  # no dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    objective, generator = grpo.algorithms.dapo(), torch.Generator().manual_seed(seed)
    state, rewards, forwarded = objective.init(), [], []
    group = torch.arange(PROMPTS).repeat_interleave(ROLLOUTS_PER_GROUP)
    mask = torch.ones(len(group), LENGTH, dtype=torch.bool)  # False on padding; here is none
    for _ in range(num_updates):
        prompts = torch.randint(DIGITS, (PROMPTS, LENGTH))[group]
        tokens, logp = sample(model, prompts)
        reward = (tokens[:, LENGTH:] == prompts.sort(dim=1).values).all(dim=1).float()
        rollouts = grpo.Rollouts(
            group=group, reward=reward, outcome=reward, mask=mask, behavior_logp=logp
        )
        credit, state = grpo.assign_credit(objective, rollouts, state, generator)
        rows = credit.weighted_rows  # the others have no gradient and need no forward pass
        rewards, forwarded = [*rewards, float(reward.mean())], [*forwarded, len(rows)]
        if len(rows) > 0:
            new, part = log_prob(model, tokens[rows]), credit.select(rows)
            loss = grpo.loss(objective, logp=new, proximal_logp=logp[rows], credit=part)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rewards, forwarded


if __name__ == "__main__":  # seconds on a CPU
    rewards, forwarded = train()
    print(f"mean reward: {rewards[0]:.2f} at first, {sum(rewards[-10:]) / 10:.2f} in the end")
    print(f"forwarded: {sum(forwarded)} of {UPDATES * PROMPTS * ROLLOUTS_PER_GROUP} rollouts")
