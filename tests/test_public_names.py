"""The names that people import: a new one, or one that goes, is a decision and not an accident."""

import importlib

import pytest

NAMES = {
    "rollway": """
        Chat Environment Judge Message Reply Rollout Stopped Task ToolCall Toolset group_reward hub jsonl
        load_environment metric parquet reward shuffled stop tool update""",
    "rollway.testing": """
        Answer Played PlayedRow PolicyPrompt RolloutFailed ScriptedEngine Stage call model_folder play
        play_group scripted_engine""",
    "rollway.transport": "Batch Batches Published open_batches",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module: str) -> None:
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == NAMES[module].split()
    for name in imported.__all__:
        assert getattr(imported, name) is not None
