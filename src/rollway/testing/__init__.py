"""Tests environments without a model: the policy is a function from the conversation to a reply.

    from rollway import testing

    def answer(prompt: testing.PolicyPrompt) -> str:
        return "ada, bob" if "Sort" in prompt.last_text else "?"

    async def test_it_sorts() -> None:
        played = await testing.play(MyEnv(), task, answer)
        assert played.reward == 1.0

A rollout is played by the same code as in a worker: real turns over HTTP, tools, stops, updates,
children, rewards, rows. One thing differs. A test's environment cannot be built again in another
process, so plain (not async) code runs in threads of this process, on a copy of the environment. A
deadline ends the rollout then, but cannot kill the code.
"""

from ..errors import RolloutFailed
from .engine import ScriptedEngine, scripted_engine
from .model import model_folder
from .play import Played, PlayedRow, Stage, play, play_group
from .script import Answer, PolicyPrompt, call

__all__ = [
    "Answer",
    "Played",
    "PlayedRow",
    "PolicyPrompt",
    "RolloutFailed",
    "ScriptedEngine",
    "Stage",
    "call",
    "model_folder",
    "play",
    "play_group",
    "scripted_engine",
]
