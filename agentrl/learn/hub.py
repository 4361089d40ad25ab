"""Finds the model that a recipe names: a folder, or a Hugging Face id that is downloaded once into the hub's cache.

huggingface_hub decides where the cache is (HF_HOME), which token is sent (HF_TOKEN, or `hf auth login`), which server
is asked (HF_ENDPOINT). Only weights in safetensors, configuration and tokenizer are fetched, never code or pickles.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import RecipeError

FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_hub_id(path: Path) -> bool:
    """Tell whether a path that is no folder here reads like `organisation/model`."""
    return not path.exists() and HUB_ID.fullmatch(str(path)) is not None


def model_folder(path: Path, revision: str | None = None) -> Path:
    """Return the folder of a model; one that is named by a Hugging Face id is downloaded where it is not cached."""
    if not is_hub_id(path):
        if revision is not None:
            raise RecipeError(f"model.revision is for models of the Hugging Face hub; {path} is a folder, leave it out")
        return path
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name = f"{path}@{revision}" if revision else str(path)
    hint = f"or name a folder: hf download {path} --local-dir DIR on a machine that can"
    try:
        folder = Path(snapshot_download(str(path), revision=revision, allow_patterns=list(FILES)))
    except errors.GatedRepoError as error:
        raise RecipeError(
            f"model.path: {name} is gated: accept its terms on {constants.ENDPOINT}/{path} and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise RecipeError(f"model.revision: {path} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise RecipeError(
            f"model.path: there is no folder {path} here and no model {path} on {constants.ENDPOINT}; is it spelled "
            "right? A private one needs HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise RecipeError(
            f"model.path: there is no folder {path} here, {name} is not in the hub's cache, and {constants.ENDPOINT} "
            f"cannot be reached; go online once, set HF_ENDPOINT, {hint}"
        ) from error
    except (OSError, ValueError) as error:  # httpx's errors and those of a full disk are OSErrors here
        raise RecipeError(f"model.path: {name} could not be downloaded: {error}; try again, {hint}") from error
    if not any(folder.glob("*.safetensors")):
        raise RecipeError(f"model.path: {name} has no weights in safetensors; convert it, and name the folder")
    return folder
