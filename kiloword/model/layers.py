"""Layers of a tower by depth: what freezing, layer-wise learning rates and gradual unfreezing go by."""

from __future__ import annotations

from torch import nn

from kiloword.model.blocks import Unit


def layers_of(tower: nn.Module) -> list[list[str]]:
    """Prefixes of parameter names by depth: those of a trunk, then those of the tower itself.

    The first layer of the tower itself also holds its stem and embeddings, the last one its final norm; blocks beside
    the last ones are of their depth. A tower without blocks of its own is one layer.
    """
    trunk = getattr(tower, "trunk", None)
    below = [] if trunk is None else [[f"trunk.{prefix}" for prefix in layer] for layer in trunk.blocks()]
    units = [name for name, part in tower.named_modules() if isinstance(part, Unit) and not name.startswith("trunk.")]
    beside = [name for name in units if name.startswith("uncertainty_blocks.")]
    layers: list[list[str]] = [[name] for name in units if name not in beside] or [[]]
    for n, name in enumerate(beside):
        layers[n - len(beside)].append(name)
    tops = {name.partition(".")[0] for name, _ in tower.named_parameters()}
    layers[0] += sorted(tops - {name.partition(".")[0] for name in units} - {"trunk", "norm"})
    if "norm" in tops:
        layers[-1].append("norm")
    return below + layers


def depths(tower: nn.Module) -> dict[str, int]:
    """Parameter name -> its layer in `layers_of`; 0 for one that no layer names."""
    layers = {f"{prefix.rstrip('.')}.": depth for depth, layer in enumerate(layers_of(tower)) for prefix in layer}
    names = [name for name, _ in tower.named_parameters()]
    return {name: next((n for prefix, n in layers.items() if f"{name}.".startswith(prefix)), 0) for name in names}


def trunk_layers(tower: nn.Module) -> int:
    """Number of layers of the tower's trunk, the first ones of `layers_of`; 0 without a trunk."""
    trunk = getattr(tower, "trunk", None)
    return 0 if trunk is None else len(trunk.blocks())


def layer_factors(module: nn.Module, decay: float) -> dict[str, float]:
    """Learning-rate multipliers of layer-wise decay by name of the parameter, where they are not 1.

    Layer l of the n of a tower (`layers_of`, from the bottom) has decay^(n - l); what is above the towers (head,
    decoders) has 1. Source: arXiv:2106.08254, section 3.1, which takes it from arXiv:2003.10555.
    """
    if decay == 1:
        return {}
    factors: dict[str, float] = {}
    for path, part in module.named_modules():
        if path.rpartition(".")[2] in ("image_tower", "text_tower"):
            top = len(layers_of(part))
            factors |= {f"{path}.{name}": decay ** (top - depth) for name, depth in depths(part).items()}
    return factors
