"""One file per kind of step: how a policy samples a rollout and how it scores one."""
