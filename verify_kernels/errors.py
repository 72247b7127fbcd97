"""What goes wrong with kernels that a user can act on. No torch here."""


class KernelError(RuntimeError):
    """A kernel that cannot be had on this machine, or does not do what is asked; the message says what would help."""


INSTEAD = "or ask for the torch reference (--backend reference, verify_kernels.ops.use('reference'))"
