"""The command line: one small function per command, no logic. Heavy imports wait inside the functions.

Exit codes: 0 success; 1 a check failed or the work could not be done; 2 wrong input; 3 training stopped early, with a
checkpoint to resume from; 130 interrupted.
"""

import sys
from typing import Any

import typer

# Importing a module registers its commands, in the order in which `--help` lists them.
from agentrl.cli import training as training  # isort: skip
from agentrl.cli import everyday as everyday  # isort: skip
from agentrl.cli import reading as reading  # isort: skip
from agentrl.cli import data as data  # isort: skip
from agentrl.cli import environments as environments  # isort: skip
from agentrl.cli import machine as machine  # isort: skip
from agentrl.cli import redteam as redteam  # isort: skip
from agentrl.cli.base import app


def main(argv: list[str] | None = None) -> Any:
    """Run a command; every error of ours becomes one clear message and an exit code that means something."""
    from agentrl import extras
    from agentrl.errors import AgentRLError, UserError

    try:
        return app(args=argv, prog_name="agentrl", standalone_mode=True)
    except UserError as error:
        typer.echo(f"agentrl: {error}", err=True)
        sys.exit(2)
    except AgentRLError as error:
        typer.echo(f"agentrl: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        advice = extras.advice(error.name or "")
        if not advice:
            raise
        typer.echo(f"agentrl: this needs {error.name}: {advice}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("agentrl: interrupted", err=True)
        sys.exit(130)
