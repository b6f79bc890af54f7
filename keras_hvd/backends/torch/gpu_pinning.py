"""The GPU of a rank: there is none, since gradients are reduced in host memory."""


def name_of_gpu() -> str:
    """The name of the GPU that training uses, for the recording; "" if there is none.

    >>> name_of_gpu()
    ''
    """
    return ""
