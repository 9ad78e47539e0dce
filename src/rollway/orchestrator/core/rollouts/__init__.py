"""Which rollouts run: tasks, groups, evaluations, retries, and every bound on them."""
