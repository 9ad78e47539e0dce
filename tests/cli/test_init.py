"""`rollway init` and `rollway envs`, as users call them."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rollway as rw
from rollway.cli.envs import describe
from rollway.cli.main import make_app
from rollway.errors import ConfigError

SOURCE = Path(rw.__file__).parents[1]


def init(*args: str) -> str:
    result = CliRunner().invoke(make_app(), ["init", *args], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_new_environment_passes_its_own_test_and_can_be_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "letters-env"
    output = init("letters-env", "--dir", str(folder))
    assert f"cd {folder} && python -m pytest" in output
    written = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    assert written == [
        "README.md", "letters_env.py", "pyproject.toml", "run.toml", "tests/test_letters_env.py"
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error"],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "6 passed" in tested.stdout
    env = rw.load_environment(str(folder / "letters_env.py"), max_length=3)
    assert type(env).__name__ == "LettersEnv"
    assert len(list(env.eval_tasks())) == 100


def test_all_files_use_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    from rollway.config.load import load

    monkeypatch.chdir(tmp_path)
    init("letters-env")
    project = tomllib.loads(Path("letters-env/pyproject.toml").read_text())
    points = project["project"]["entry-points"]["rollway.environments"]
    assert points == {"letters-env": "letters_env:load_environment"}
    assert [env.id for env in load(Path("letters-env/run.toml"), []).env] == ["letters-env"]
    assert not [path for path in Path("letters-env").rglob("*.*") if "$" in path.read_text()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Env", "use lowercase letters"),
        ("my_env", "use lowercase letters"),
        ("my--env", "use lowercase letters"),
        ("2048", "begin with a letter"),
        ("../up", "use lowercase letters"),
        ("class", "a keyword of Python"),
        ("reverse-text", "an environment 'reverse-text' exists already"),
        ("json", "a module 'json' is installed already"),
    ],
)
def test_names_that_would_not_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        init(name)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    existing = tmp_path / "README.md"
    existing.write_text("mine")
    with pytest.raises(
        ConfigError, match=r"README.md exists; choose another folder with --dir"
    ):
        init("letters-env", "--dir", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert existing.read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        init("letters-env", "--dir", str(existing))


def test_environments_are_listed_with_a_description() -> None:
    listed = CliRunner().invoke(make_app(), ["envs"]).output.splitlines()
    (line,) = [line for line in listed if line.startswith("reverse-text ")]
    assert line.endswith("  say a random word backwards. Single turn, exact-match reward.")


def test_describing_an_environment_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loud_env.py").write_text(
        '"""loud: shouts.\n\nMore of it.\n"""\nraise SystemExit(3)\n'
    )

    def described(module: str) -> str:
        point = EntryPoint("loud", f"{module}:load_environment", "rollway.environments")
        return describe("loud", point)

    assert described("loud_env") == "shouts."
    assert described("no_such_env") == "cannot be loaded: no module no_such_env"
    assert (
        described("no_such.env")
        == "cannot be loaded: ModuleNotFoundError: No module named 'no_such'"
    )
