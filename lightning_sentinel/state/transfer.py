"""A few numbers on their way from a device to the host, and the one place where a step's record is read at once.

Example:
    >>> Transfer(torch.tensor([1.0, 2.0])).read().tolist()
    [1.0, 2.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def read_now(tensor: Tensor) -> NDArray[np.float64]:
    """The values, at the price of waiting until the device has computed them."""
    values: NDArray[np.float64] = tensor.cpu().numpy()
    return values


class Transfer:
    """Copies a tensor to the host without waiting: on CUDA into page-locked memory, with an event behind it.

    :meth:`read` is meant for one step later. By then the copy has long arrived, unless the host is more than a step ahead of
    the device; then it waits for that copy alone, while the device still has the whole newer step in its queue.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: Any = None
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        module = torch.get_device_module(tensor.device)
        if hasattr(module, "Event"):
            self._arrived = module.Event()
            self._arrived.record(module.current_stream(tensor.device))

    def read(self) -> NDArray[np.float64]:
        if self._arrived is not None:
            self._arrived.synchronize()
        values: NDArray[np.float64] = self._host.numpy()
        return values
