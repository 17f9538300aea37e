"""The end of the output."""

from radixkv.cache.hybrid.placement import Placement


class Output(Placement):
    """The end of the output, where that is cached: a chat whose template repeats it as it was goes on from there."""

    name = "output"
    keeps_output = True
