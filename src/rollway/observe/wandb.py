"""Sends steps to Weights & Biases. A run that is resumed continues under the same id."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WeightsAndBiases:
    """One run of a W&B project. `WANDB_MODE=offline` keeps it in `folder` for `wandb sync`."""

    def __init__(
        self, project: str, run_id: str, folder: Path, config: dict[str, Any]
    ) -> None:
        """Begin or resume the run. `project` may name a team too: `team/project`."""
        entity, _, project = project.rpartition("/")
        self._run = wandb.init(
            entity=entity or None, project=project, name=folder.name, id=run_id, resume="allow",
            dir=str(folder), config=config, settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._newest = 0

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log the values of a step. W&B refuses to go back, so values of an older step, such as those of
        an evaluation, are logged at the newest step."""
        self._newest = max(self._newest, step)
        self._run.log(dict(values), step=self._newest)

    def close(self) -> None:
        self._run.finish()
