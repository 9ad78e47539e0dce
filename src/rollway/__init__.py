"""rollway: the rollout plane of asynchronous RL for language models.

What environment authors import:

    import rollway as rw

    class MyEnv(rw.Environment): ...
"""

from .envs.chat import Chat, Reply
from .envs.environment import Environment
from .envs.registry import load_environment
from .envs.rewards import metric, reward
from .envs.rollout import Rollout
from .records.task import Message, Task

__all__ = [
    "Chat",
    "Environment",
    "Message",
    "Reply",
    "Rollout",
    "Task",
    "load_environment",
    "metric",
    "reward",
]
