"""A judge asks a real endpoint and reads a number out of what it says."""

import pytest
from tests.doubles.chat import chat_double

import rollway as rw
from rollway.errors import EngineError

pytestmark = pytest.mark.anyio


async def test_a_judge_gives_text_and_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    answers = {"good?": "Clear, but 2 mistakes. Grade: 0.75", "bad?": "I would rather not say."}
    async with chat_double(lambda said, before: answers[said], key="secret") as double:
        judge = rw.Judge(double.url, "double", key_var="JUDGE_KEY", system_prompt="Be strict.")
        assert await judge.ask("good?") == answers["good?"]
        assert await judge.grade("good?") == 0.75
        with pytest.raises(EngineError, match="gave no number: 'I would rather"):
            await judge.grade("bad?")
        assert double.asked[0]["messages"][0] == {"role": "system", "content": "Be strict."}
        assert double.asked[0]["temperature"] == 0.0
