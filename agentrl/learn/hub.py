"""Finds the model that a recipe names: a folder, or a Hugging Face id that is downloaded once into the hub's cache.

huggingface_hub decides where the cache is (HF_HOME), which token is sent (HF_TOKEN, or `hf auth login`), which server
is asked (HF_ENDPOINT). Only weights in safetensors, configuration and tokenizer are fetched, never code or pickles.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import RecipeError, UserError

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_hub_id(path: Path) -> bool:
    """Tell whether a path that is no folder here reads like `organisation/model`."""
    return not path.exists() and HUB_ID.fullmatch(str(path)) is not None


def model_folder(path: Path, revision: str | None = None) -> Path:
    """Return the folder of a recipe's model; one that is named by a Hugging Face id is downloaded first."""
    if not is_hub_id(path):
        if revision is not None:
            raise RecipeError(f"model.revision is for models of the Hugging Face hub; {path} is a folder, leave it out")
        return path
    try:
        folder = download(str(path), revision)
    except UserError as error:
        raise RecipeError(f"model.path: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise RecipeError(f"model.path: {path} has no weights in safetensors; convert it, and name the folder")
    return folder


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder in the hub's cache that holds a model, after fetching what is missing."""
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name}: the hub asks for an accepted licence: accept it on {hub}/{name}, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name}: the hub has no revision {revision!r} of it") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{name}: no such folder here and no such model on the hub (a private one needs HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise UserError(
            f"{name}: no such folder here, the hub cannot be reached, and its cache does not hold the model; name a "
            f"folder, or fetch it where there is a network: `hf download {name}` (the hub is {hub})"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{name}: it could not be fetched from the hub ({hub}): {reason}") from error
