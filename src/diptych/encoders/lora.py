"""Low-rank adapters (LoRA) through peft, an extra: trained beside frozen weights, saved merged into them."""

from __future__ import annotations

from torch import Tensor, nn

from diptych.errors import MissingExtra, SettingsError

TARGETS = ("q_proj", "v_proj")  # the attention's queries and values, as in the LoRA paper
SCALE = 2.0  # α / r: the update is SCALE · B A
NAME = "default"  # peft's name of the only adapter


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a transformer and give its queries and values adapters of ``rank``: W x → W x + SCALE · B A x, B = 0."""
    if rank < 1:
        raise SettingsError(f"lora={rank} is not a rank of an adapter: give 1 or more (8 is usual).")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise MissingExtra("peft", "lora", "training with LoRA") from error
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=list(TARGETS), lora_dropout=0.0)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise SettingsError(
            f"this encoder has no layers called {' or '.join(TARGETS)} for LoRA: tune it in full instead."
        ) from error


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state without adapters that computes the same: W + SCALE · B A in the place of each adapted W."""
    adapted = {name.split(".lora_A.")[0] for name in state if ".lora_A." in name}
    plain = {}
    for name, value in state.items():
        layer, inner, rest = name.partition(".base_layer.")
        if is_adapter(name):
            continue
        if inner and layer in adapted:
            if rest == "weight":
                value = (
                    value
                    + SCALE * state[f"{layer}.lora_B.{NAME}.weight"] @ state[f"{layer}.lora_A.{NAME}.weight"]
                )
            plain[f"{layer}.{rest}"] = value
        else:
            plain[name] = value
    return plain
