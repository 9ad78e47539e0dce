"""The staleness rule: which versions may still train.

Version n is the weights after step n, so step n trains version n - 1 into version n. The staleness of a
rollout at step n is n - 1 minus the version that sampled its first token. A rollout may train if its
staleness is at most `max_off_policy_steps`.
"""

from ....records.ids import PolicyVersion, Step


def oldest_trainable(step: Step, max_off_policy_steps: int) -> PolicyVersion:
    """Return the oldest version whose rollouts may train at `step`."""
    return PolicyVersion(step - 1 - max_off_policy_steps)


def is_trainer_behind(
    step: Step, published: PolicyVersion, max_off_policy_steps: int
) -> bool:
    """Return whether the batch of `step` must wait, because the trainer is too far behind it."""
    return step - 1 - published > max_off_policy_steps
