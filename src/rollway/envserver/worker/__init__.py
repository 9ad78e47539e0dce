"""The worker process: runs rollouts of one environment. Only here does the environment's code run."""
