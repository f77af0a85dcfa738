"""Optional packages that are built on torchvision, which is compiled against one build of torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from diptych.errors import MissingExtra, SettingsError


def import_package(name: str, package: str, extra: str, what: str) -> ModuleType:
    """The module ``name`` of an optional package, for ``what``; a torchvision of another torch is told as such."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise MissingExtra(package, extra, what) from error
        raise _broken(name.partition(".")[0], error) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise _broken(name.partition(".")[0], error) from error


def _broken(name: str, error: Exception) -> SettingsError:
    reason = " ".join(str(error).split())[:160]
    return SettingsError(
        f"{name} is installed but does not import ({reason}): install the torchvision of this torch, "
        "or use an hf: model, which needs none."
    )
