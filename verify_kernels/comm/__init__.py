"""Communication among any number of ranks.

`Group` is the interface, with what it carried counted by name, kind and bytes. `Alone` is one rank without the others
(a rank measured by itself, or a group of one), `Distributed` torch.distributed with NCCL or gloo.
"""

from verify_kernels.comm.group import Alone, Distributed, Group

__all__ = ["Alone", "Distributed", "Group"]
