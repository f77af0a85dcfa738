"""Run by two processes: clip gradients of a divided layer and of a whole one, and compare with one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from diptych.training.sharding import clip_shares


def main() -> None:
    """Say ``equal`` where both agree."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer, head = nn.Linear(5, 3), nn.Parameter(torch.zeros(2))
    gradients = {name: 4 * torch.randn_like(p) for name, p in layer.named_parameters()}
    own = torch.randn(2)
    plain = [torch.zeros_like(g).requires_grad_() for g in (*gradients.values(), own)]
    for tensor, gradient in zip(plain, (*gradients.values(), own), strict=True):
        tensor.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(plain, 2.0)

    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    for name, parameter in layer.named_parameters():
        parameter.grad = distribute_tensor(gradients[name], parameter.device_mesh, parameter.placements)
    head.grad = own.clone()
    clip_shares([*layer.parameters(), head], 2.0)
    found = [p.grad.full_tensor() for p in layer.parameters()] + [head.grad]
    same = all(
        torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(found, plain, strict=True) if b.grad is not None
    )
    print("equal" if same else "different", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
