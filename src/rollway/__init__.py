"""rollway: the rollout plane of asynchronous RL for language models.

Environment authors write `import rollway as rw` and `class MyEnv(rw.Environment)`.
"""

from typing import TYPE_CHECKING, Any

from .envs.chat import Chat, Stopped
from .envs.datasets import hub, jsonl, parquet, shuffled
from .envs.environment import Environment
from .envs.marks import stop, update
from .envs.registry import load_environment
from .envs.rewards import group_reward, metric, reward
from .envs.rollout import Reply, Rollout
from .envs.tools import Toolset, tool
from .records.task import Message, Task, ToolCall

if TYPE_CHECKING:
    from .inference.chat.judge import Judge

__all__ = [
    "Chat",
    "Environment",
    "Judge",
    "Message",
    "Reply",
    "Rollout",
    "Stopped",
    "Task",
    "ToolCall",
    "Toolset",
    "group_reward",
    "hub",
    "jsonl",
    "load_environment",
    "metric",
    "parquet",
    "reward",
    "shuffled",
    "stop",
    "tool",
    "update",
]


def __getattr__(name: str) -> Any:
    """Import `Judge` when it is first used: it needs the HTTP client, which takes long to import."""
    if name == "Judge":
        from .inference.chat.judge import Judge

        return Judge
    raise AttributeError(f"module 'rollway' has no attribute '{name}'")
