"""Class-sharded logits, the ordinary cross-entropy, and no rank that ever holds all classes.

Run it with:

    torchrun --nproc-per-node 2 examples/loss_parallel_torch.py
"""

import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Shard, init_device_mesh, loss_parallel

TOKENS, CLASSES = 6, 259


def main() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same numbers on both ranks, to compare with
    everything = torch.randn(TOKENS, CLASSES)
    labels = torch.randint(CLASSES, (TOKENS,))

    local = everything.chunk(2, dim=-1)[mesh.get_local_rank()].clone().requires_grad_()
    logits = DTensor.from_local(local, mesh, [Shard(-1)], shape=everything.shape)
    with loss_parallel():
        loss = F.cross_entropy(logits, labels)
        loss.backward()

    expected = F.cross_entropy(everything, labels)
    print(
        f"rank {mesh.get_local_rank()} holds {local.shape[-1]} of {CLASSES} classes: "
        f"loss {loss.to_local().item():.6f}, on one device {expected.item():.6f}"
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
