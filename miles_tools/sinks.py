"""Optional sinks: TensorBoard, Weights & Biases and alerts, their options and their manifest. The packages are imported only if the sink
is enabled."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, MilesError
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.options import option
from miles_core.redact import redact_values
from miles_core.version import __version__

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.contracts.run import Run

_LOGIN = "run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline to keep the metrics on this machine"
#: Variables that give Weights & Biases a login, or a mode without one.
_LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DISABLED", "WANDB_ANONYMOUS")
#: File with the id of a run at Weights & Biases.
WANDB_ID = "wandb_id"


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """Metrics of the run in other programs."""

    use_wandb: bool = option(
        False, help="also send metrics to Weights & Biases; a resumed run continues the same record"
    )
    wandb_project: str = option("miles", help="Weights & Biases project", metavar="NAME", only_if="sinks.use_wandb")
    wandb_group: str | None = option(None, help="Weights & Biases group", metavar="NAME", only_if="sinks.use_wandb")
    wandb_name: str | None = option(
        None,
        help="name of the run in Weights & Biases (default: name of the run directory)",
        metavar="NAME",
        only_if="sinks.use_wandb",
    )
    use_tensorboard: bool = option(False, help="also write metrics for TensorBoard into the run directory")
    alert_command: str | None = option(
        None,
        help="command to run for each hint and when the run stops early; receives the alert as JSON on standard input",
        metavar="COMMAND",
    )
    alert_webhook: str | None = option(
        None,
        help="http(s) address that receives the same alerts as POST requests with a JSON body (kind, run, step, text); $NAME reads the "
        "address from an environment variable, so that it is not written to the run directory",
        metavar="URL",
    )


plugin = Plugin(
    name="sinks",
    summary="metrics for TensorBoard and Weights & Biases, and alerts, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    standard=True,
    config=Sinks,
    provides={
        "sink": {
            "tensorboard": "miles_tools.sinks:make_tensorboard",
            "wandb": "miles_tools.sinks:make_wandb",
            "alerts": "miles_tools.alerts:make_alerts",
        },
    },
    examine="miles_tools.sinks:examine",
)


class TensorBoard:
    """Writes scalars as TensorBoard event files into ``directory``. Raises MilesError without the package."""

    def __init__(self, directory: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("--use-tensorboard", "tensorboard", error) from error
        self._writer = SummaryWriter(log_dir=str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Sends scalars to a run of Weights & Biases. Raises MilesError without the package.

    Args:
        directory: directory for local files and the run's id, with which a resumed run continues the same W&B run.
        name: name of the W&B run.
        config: the effective configuration.
        project, group: project and group of the W&B run.
    """

    def __init__(
        self, directory: Path, name: str, config: Mapping[str, Any], project: str, group: str | None = None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("--use-wandb", "wandb", error) from error
        file = directory / WANDB_ID
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        try:
            self._run = wandb.init(
                project=project,
                group=group,
                name=name,
                id=known or None,
                dir=str(directory),
                config=redact_values(dict(config)),
                resume="allow",
            )
        except Exception as error:  # whatever the package raises: no key, no network, no permission
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise MilesError(f"--use-wandb: Weights & Biases did not start the run ({reason}); {_LOGIN}") from error
        file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def make_tensorboard(run: Run) -> TensorBoard | None:
    """Make the sink of ``--use-tensorboard``."""
    return TensorBoard(run.directory / "tensorboard") if _options(run.config).use_tensorboard else None


def make_wandb(run: Run) -> WeightsAndBiases | None:
    """Make the sink of ``--use-wandb``."""
    options = _options(run.config)
    if not options.use_wandb:
        return None
    name = options.wandb_name or run.directory.absolute().name
    return WeightsAndBiases(run.directory, name, vars(run.config.args), options.wandb_project, options.wandb_group)


def _options(config: Config) -> Sinks:
    options: Sinks = config.plugin("sinks")
    return options


def examine(config: Config, weights: bool) -> None:
    """See ``Plugin.examine``: check that the packages of the chosen sinks are installed, that Weights & Biases has a login, and that alerts
    can be sent. Not for a plan, which may be made on another machine.

    Raises:
        ConfigError, MilesError: a package, a login, a program or the address of a webhook is missing.
    """
    if not weights:
        return
    options = _options(config)
    for name, flag, package in (
        ("use_wandb", "--use-wandb", "wandb"),
        ("use_tensorboard", "--use-tensorboard", "tensorboard"),
    ):
        if getattr(options, name) and find_spec(package) is None:
            raise ConfigError(f"{flag} needs the package {package!r}, which is not installed: pip install {package}")
    if options.use_wandb:
        check_wandb_login()
    from miles_tools.alerts import check_command, webhook_address

    if options.alert_command is not None:
        check_command(options.alert_command)
    if options.alert_webhook is not None:
        webhook_address(options.alert_webhook)


def check_wandb_login() -> None:
    """Look for a login of Weights & Biases without a connection: variables, its settings files and the netrc file.

    Raises:
        MilesError: there is none, and no terminal on which the package could ask for a key.
    """
    home = Path.home()
    base = os.environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb")
    settings = [Path(os.environ.get("WANDB_DIR", ".")) / "wandb" / "settings", Path(base) / "settings"]
    logins = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [home / ".netrc", home / "_netrc"]
    if any(os.environ.get(name) for name in _LOGIN_VARIABLES) or sys.stdin.isatty():
        return
    if not any(file.is_file() for file in (*settings, *logins)):
        raise MilesError(f"--use-wandb: no login of Weights & Biases was found on this machine; {_LOGIN}")


def _missing(flag: str, package: str, error: ImportError) -> MilesError:
    return MilesError(
        f"{flag} needs the package {package!r}, which cannot be imported here ({error}); run: pip install {package}"
    )
