"""What can go wrong, by name.

Bad arguments raise ``ValueError`` or ``TypeError`` and memory that does not fit raises
``torch.OutOfMemoryError``, as in torch; the classes here are for what torch has no word for.
"""


class GhoffloadError(RuntimeError):
    """Base of the errors that are ghoffload's own."""


class MachineUnavailableError(GhoffloadError):
    """The machine that was asked for cannot be used here; the message says why and the mend."""


class KernelBuildError(GhoffloadError):
    """A CUDA kernel could not be compiled or loaded; the message names what is missing."""


class OrderingError(GhoffloadError):
    """Checking mode found an access that nothing orders after an earlier one; names both."""


class InterruptedStepError(GhoffloadError):
    """An earlier ``step()`` stopped part-way: weights and state are no longer of one step."""


class PinWarning(UserWarning):
    """Pinning host memory was refused; the run goes on with pageable memory, slower."""
