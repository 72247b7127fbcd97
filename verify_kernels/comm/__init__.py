"""Communication among any number of ranks.

A model divided among ranks asks a `Group` for sums, joins and exchanges, each under a name; the group counts what
passes through it by name, kind and bytes. There are three:

- `Alone`: one rank of N without the others. Nothing travels and its own part stands for all; what a step would send is
  read from `sent` and priced by `dspark_runtime.cost.collectives`.
- `Distributed`: torch.distributed, NCCL between GPUs and gloo on CPUs.
- `symmetric.Symmetric`: Triton kernels that write into the other GPUs' memory over NVLink or any link over which GPUs
  address one another (torch's symmetric memory, without multicast), made for the few rows of a verify pass.

| operation | Symmetric sends | flights |
|---|---|---|
| all_reduce, one shot | x to every rank, each adds | 1 |
| all_reduce, two shots | each unit of 1024 elements to its owner, the sum to every rank | 2 |
| all_reduce_norm | as all_reduce, by rows; residual add and RMSNorm in the same launch | 1 or 2 |
| reduce_scatter | to every rank its columns, which it adds | 1 |
| all_gather | x to every rank | 1 |
| all_to_all | to every rank its rows; by counts only so many, the counts with them | 1 |

One launch is one collective: there is no barrier and no fence, because every element says by itself whether it has come
(`kernels` has the protocol). Two shots are taken when what they save takes the link longer than the second flight costs
(`symmetric.two_shot`: from 175 KB among 8 ranks, 600 KB among 4, never between 2). Messages past 1 MB a rank are
torch.distributed's. Nothing is read by the host, so CUDA graphs capture all of it.

The kernels have not run on a GPU. Triton's interpreter runs them on CPUs between processes that share memory, they
compile for sm_90, and `python -m eval.bench_comm --gpus N` checks and times them beside NCCL on 1 to 8 GPUs of a host.
"""

from verify_kernels.comm.group import Alone, Distributed, Group

__all__ = ["Alone", "Distributed", "Group"]
